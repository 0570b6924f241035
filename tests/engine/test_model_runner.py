"""The model runner on the default model: equal to the reference, independent of chunks and of the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from checkpoints import SERVED, VOCAB_SIZE, make_checkpoint
from runners import Bench, DType, default_model, load, make_bench
from step_planner import GREEDY, Job, StepPlanner

from ringserve.config import ModelSource
from ringserve.engine.gguf_weights import load_llama, open_gguf
from ringserve.engine.model_loader import LoadedModel
from ringserve.engine.self_check import TracedModel
from ringserve.messages.columns import pack_i32, unpack_f32, unpack_i32
from ringserve.messages.logprobs import LogprobColumns
from ringserve.messages.sampling import SamplingParams
from ringserve.messages.steps import ModelRunnerOutput, NewSequence, SchedulerOutput

QUESTION = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
"""<|im_start|>user ... What is the capital of France?<|im_end|> ... assistant"""

NUM_PAGES = 40
PAGE_SIZE = 64

Loaded = tuple[LoadedModel, TracedModel]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def bf16() -> Loaded:
    return load(default_model(), "bfloat16")


@pytest.fixture(scope="module")
def f32() -> Loaded:
    return load(default_model(), "float32")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("small") / "llama", *SERVED["llama"])
    return load(ModelSource(str(checkpoint), "directory", "small"), "float32")


def bench_of(loaded: Loaded, dtype: DType, page_size: int = PAGE_SIZE, num_pages: int = NUM_PAGES) -> Bench:
    return make_bench(*loaded, dtype=dtype, page_size=page_size, num_pages=num_pages)


def run(bench: Bench, jobs: list[Job], budget: int = 512) -> list[list[int]]:
    pool = bench.pool
    return StepPlanner(bench.runner, pool.num_pages, pool.page_size, 64, budget).run(jobs)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """A prompt of ordinary text tokens, after the question's words."""
    generator = np.random.default_rng(seed)
    return [*QUESTION, *generator.integers(300, 8000, length).tolist()][-length:]


def test_answers_a_question(bf16: Loaded) -> None:
    """The capital of France is Paris.<|im_end|>"""
    assert run(bench_of(bf16, "bfloat16"), [Job(QUESTION, 8)]) == [[504, 3575, 282, 4649, 314, 7042, 30, 2]]


def test_equals_generate_in_float32(f32: Loaded) -> None:
    prompts = [[504], QUESTION, prompt_of(100)]
    new_tokens = 8
    bench = bench_of(f32, "float32")
    jobs = [Job(prompt, new_tokens) for prompt in prompts]
    run(bench, jobs, budget=32)

    file = open_gguf(Path(default_model().path))
    model: Any = load_llama(file, torch.float32, "eager", lambda fraction: None)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 2
    with torch.no_grad():
        for job in jobs:
            ids = torch.tensor([[*job.prompt]])
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new_tokens,
                return_dict_in_generate=True,
                output_logits=True,
            )
            assert job.tokens == out.sequences[0, len(job.prompt) :].tolist()
            expected = torch.cat(out.logits).numpy()
            got = np.stack(bench.sampler.seen[job.slot])
            assert got.shape == expected.shape
            assert np.abs(got - expected).max() <= 1e-4 * (expected.max() - expected.min())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_logits_are_independent_of_batch_and_chunks(dtype: DType, request: pytest.FixtureRequest) -> None:
    """Bit for bit: the same logits alone, among others that come and go, and with a budget of 32 tokens."""
    loaded: Loaded = request.getfixturevalue({"bfloat16": "bf16", "float32": "f32"}[dtype])
    probe = prompt_of(90, seed=3)
    new_tokens = 8

    alone = bench_of(loaded, dtype)
    run(alone, [job := Job(probe, new_tokens)])
    expected = np.stack(alone.sampler.seen[job.slot])

    def others() -> list[Job]:
        return [Job(prompt_of(3 + 17 * i, seed=10 + i), 2 + i, arrives=i // 2) for i in range(6)]

    for budget in (512, 32):
        bench = bench_of(loaded, dtype)
        run(bench, [*others(), among := Job(probe, new_tokens, arrives=1)], budget)
        got = np.stack(bench.sampler.seen[among.slot][-new_tokens:])
        assert among.tokens == job.tokens
        assert np.array_equal(got, expected)


@pytest.mark.parametrize("done", [0, 1, 4, 7])
def test_a_sequence_sent_again_goes_on_identically(bf16: Loaded, done: int) -> None:
    """Resumed or preempted: prompt and generated tokens are computed anew, seeds and penalties included."""
    sampling = SamplingParams(
        seed=11, temperature=0.9, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.4, min_tokens=6
    )
    bench = bench_of(bf16, "bfloat16")
    run(bench, [whole := Job(QUESTION, 8, sampling)])
    again = Job(QUESTION, 8, sampling, generated_before=whole.tokens[:done])
    run(bench_of(bf16, "bfloat16"), [Job(prompt_of(9), 3), again])
    assert again.tokens == whole.tokens[done:]


def columns_of(part: LogprobColumns) -> list[list[tuple[int, float]]]:
    ids, values = unpack_i32(part.token_ids).tolist(), unpack_f32(part.values).tolist()
    entries: list[list[tuple[int, float]]] = []
    for count in unpack_i32(part.counts):
        entries.append(list(zip(ids[:count], values[:count], strict=True)))
        ids, values = ids[count:], values[count:]
    return entries


@pytest.mark.parametrize("budget", [7, 64])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_prompt_logprobs(small: Loaded, budget: int, max_tokens: int) -> None:
    """Every position once, in order, the first without candidates; the values are the model's."""
    prompt = np.random.default_rng(1).integers(3, VOCAB_SIZE, 25).tolist()
    sampling = msgspec.structs.replace(GREEDY, prompt_logprobs=2, logprobs=1)
    bench = bench_of(small, "float32", page_size=8)
    planner = StepPlanner(bench.runner, NUM_PAGES, 8, 64, budget)
    other = Job(prompt[:9], 4)
    planner.run(
        [other, job := Job(prompt, max_tokens, sampling), second := Job(prompt, max_tokens, sampling, choice=1)]
    )

    entries: list[list[tuple[int, float]]] = []
    for part in job.prompt_logprobs:
        assert part.start == len(entries)
        entries += columns_of(part.columns)
    assert len(entries) == len(prompt)
    assert entries[0] == []
    model: Any = small[0].model
    model.config._attn_implementation = "eager"
    try:
        with torch.no_grad():
            expected = torch.log_softmax(model(torch.tensor([prompt]), use_cache=False).logits[0].double(), -1)
    finally:
        model.config._attn_implementation = "ringserve_paged"
    for position, entry in enumerate(entries[1:]):
        assert entry[0][0] == prompt[position + 1]
        assert [token for token, _ in entry[1:]] == expected[position].topk(2).indices.tolist()
        for token, value in entry:
            assert value == pytest.approx(float(expected[position, token]), abs=1e-4)
    assert len(job.tokens) == max_tokens
    assert second.prompt_logprobs == []
    assert second.tokens == job.tokens


def step(step_id: int, slots: list[int], num_tokens: list[int], pages: list[list[int]], **rest: Any) -> SchedulerOutput:
    return SchedulerOutput(
        step_id=step_id,
        new_sequences=rest.get("new", ()),
        slots=pack_i32(slots),
        num_tokens=pack_i32(num_tokens),
        new_page_counts=pack_i32(len(row) for row in pages),
        new_pages=pack_i32(page for row in pages for page in row),
        freed_slots=pack_i32(rest.get("freed", [])),
    )


def new_sequence(slot: int, ids: list[int], max_tokens: int = 20) -> NewSequence:
    return NewSequence(slot, pack_i32(ids), len(ids), 0, 0, GREEDY, max_tokens)


def rows_of(output: ModelRunnerOutput) -> list[tuple[int, int]]:
    return list(zip(unpack_i32(output.slots), unpack_i32(output.token_ids), strict=True))


def test_result_rows_follow_the_step_and_its_times(small: Loaded) -> None:
    bench = bench_of(small, "float32", page_size=8)
    first = (new_sequence(5, [9, 8, 7]), new_sequence(2, list(range(10, 22))), new_sequence(9, [4], max_tokens=0))
    output = bench.runner.execute(step(1, [5, 2, 9], [3, 8, 1], [[1], [2], [3]], new=first), received_ns=17)
    assert [slot for slot, _ in rows_of(output)] == [5]  # 2 is in the middle of its prompt, 9 samples nothing
    assert output.received_ns == 17
    assert 17 < output.started_ns <= output.sent_ns
    assert output.step_id == 1
    output = bench.runner.execute(step(2, [2, 5], [4, 1], [[4], []], freed=[9]))
    assert [slot for slot, _ in rows_of(output)] == [2, 5]
    output = bench.runner.execute(step(3, [], [], [], freed=[2, 5]))
    assert rows_of(output) == []


def test_pages_and_slots_are_reused_at_once(small: Loaded) -> None:
    bench = bench_of(small, "float32", page_size=8)
    fresh = bench_of(small, "float32", page_size=8)
    bench.runner.execute(step(1, [0], [12], [[3, 1]], new=(new_sequence(0, list(range(20, 32))),)))
    bench.runner.execute(step(2, [0], [1], [[]]))
    ids = [50, 51, 52, 53]
    got = bench.runner.execute(step(3, [0], [4], [[1]], new=(new_sequence(0, ids),), freed=[0]))
    expected = fresh.runner.execute(step(1, [0], [4], [[6]], new=(new_sequence(0, ids),)))
    assert rows_of(got) == rows_of(expected)
    assert np.array_equal(bench.sampler.seen[0][-1], fresh.sampler.seen[0][-1])


@pytest.mark.parametrize(
    "bad",
    [
        step(2, [0], [2], [[]]),  # only one known token is left
        step(2, [1], [1], [[]]),  # nobody is there
    ],
)
def test_a_step_that_does_not_fit_raises(small: Loaded, bad: SchedulerOutput) -> None:
    bench = bench_of(small, "float32", page_size=8)
    bench.runner.execute(step(1, [0], [7], [[1]], new=(new_sequence(0, list(range(20, 27))),)))
    with pytest.raises((RuntimeError, KeyError)):
        bench.runner.execute(bad)


def test_a_step_without_pages_for_its_tokens_raises(small: Loaded) -> None:
    bench = bench_of(small, "float32", page_size=8)
    with pytest.raises(RuntimeError, match="1 pages of 8"):
        bench.runner.execute(step(1, [0], [9], [[1]], new=(new_sequence(0, list(range(20, 29))),)))


def test_logits_that_are_not_finite_fail_one_sequence_only(small: Loaded) -> None:
    loaded, traced = small
    bench = make_bench(loaded, traced, dtype="float32", page_size=8, num_pages=NUM_PAGES)
    model: Any = loaded.model
    weight = model.get_input_embeddings().weight
    kept = weight[150].clone()
    with torch.no_grad():
        weight[150] = torch.nan
        try:
            jobs = (new_sequence(0, [150, 20]), new_sequence(1, [30, 31]))
            output = bench.runner.execute(step(1, [0, 1], [2, 2], [[1], [2]], new=jobs))
            assert [slot for slot, _ in output.failed_slots] == [0]
            assert [slot for slot, _ in rows_of(output)] == [1]
            # The next step was planned before the failure was known.
            output = bench.runner.execute(step(2, [0, 1], [1, 1], [[], []]))
            assert output.failed_slots == ()
            assert [slot for slot, _ in rows_of(output)] == [1]
        finally:
            weight[150] = kept
