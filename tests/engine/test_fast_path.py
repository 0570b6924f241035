"""The fast path on CPUs: the Llama family, the same bits in any company, and who is left to the general path."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from checkpoints import SERVED, make_checkpoint
from engine_core import EngineCore, LoadedExecutor, default_model, greedy
from fast_models import FAMILY, FastBench, load_small, make_fast_bench, prepare
from step_planner import GREEDY, Job, StepPlanner

from ringserve.config import ExecutorConfig, ExecutorSettings, ModelSource, SchedulerConfig, TokenizerSettings
from ringserve.engine import fast_startup, self_check
from ringserve.engine.cpu_loading import load_and_check
from ringserve.engine.cpu_model import CpuModel
from ringserve.engine.decoder_weights import Rotary
from ringserve.engine.devices import CPU
from ringserve.engine.fast_model import FastModel
from ringserve.engine.fast_weights import NotApplicableError, decoder_shape, layer_windows
from ringserve.engine.kept_weights import KeptWeights
from ringserve.engine.kv_layout import KVDType
from ringserve.engine.model_loader import LoadedModel, load_model
from ringserve.engine.serving_plan import plan_serving
from ringserve.engine.tokenizer_loader import load_tokenizer
from ringserve.kernels.cpu import decoder_fields as k
from ringserve.kernels.cpu.features import AVX512, PORTABLE, host_level
from ringserve.kernels.cpu.rescore import CANDIDATES
from ringserve.messages.columns import unpack_i32
from ringserve.messages.requests import TokenizedRequest

# The whole portable step takes a minute to compile: its kernels are tested one by one in any case.
LEVELS = [AVX512, pytest.param(PORTABLE, marks=pytest.mark.slow)] if host_level() == AVX512 else [PORTABLE]
KV_DTYPES: list[KVDType] = ["bfloat16", "int8"]
VOCABULARY = 211
NUM_PAGES = 400


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fast")


@pytest.fixture(scope="module")
def qwen3(directory: Path) -> LoadedModel:
    """Grouped heads, norms of queries and keys."""
    return load_small(directory, "qwen3")


@contextmanager
def bench_of(
    model: FastModel, page_size: int = 16, num_threads: int = 1, kv_dtype: KVDType = "bfloat16"
) -> Iterator[FastBench]:
    bench = make_fast_bench(model, page_size=page_size, num_pages=NUM_PAGES, num_threads=num_threads, kv_dtype=kv_dtype)
    try:
        yield bench
    finally:
        bench.runner.close()


def run(bench: FastBench, jobs: list[Job], budget: int = 512) -> None:
    StepPlanner(bench.runner, NUM_PAGES, bench.pool.page_size, 64, budget).run(jobs)


def prompt_of(length: int, seed: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(3, VOCABULARY, length).tolist()
    return ids


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", FAMILY)
def test_logits_are_the_models_own(directory: Path, name: str, level: Any, kv_dtype: KVDType) -> None:
    """``prepare`` compares them; here it must take the model, and be able to tell a difference."""
    loaded = load_small(directory, name)
    for quantization in ("none", "int8"):
        model = prepare(loaded, quantization, level, kv_dtype)
        assert model.weights.shape == decoder_shape(loaded.model)
        damaged = next(layer.self_attn.k_proj for layer in loaded.model.model.layers)  # type: ignore[union-attr]
        kept = damaged.weight.detach().clone()
        with pytest.MonkeyPatch.context() as patch:
            check = self_check.check_other_path

            def turned(*args: Any, weight: Any = damaged.weight, check: Any = check) -> None:
                weight.data.copy_(weight.data.roll(1, 0))  # after packing: another model than the one that was packed
                check(*args)

            patch.setattr(fast_startup, "check_other_path", turned)
            with pytest.raises(NotApplicableError, match="its logits differ"):
                prepare(loaded, quantization, level, kv_dtype)
        damaged.weight.data.copy_(kept)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("level", LEVELS)
def test_logits_are_independent_of_company_chunks_and_threads(
    qwen3: LoadedModel, quantization: str, level: Any, kv_dtype: KVDType
) -> None:
    """Bit for bit: alone, with 1, 7 and 31 others, in chunks of any size, with two threads, after preemption."""
    model = prepare(qwen3, quantization, level, kv_dtype)
    probe, new_tokens = prompt_of(75, 3), 6
    with bench_of(model, kv_dtype=kv_dtype) as bench:
        run(bench, [job := Job(probe, new_tokens)])
        expected = np.stack(bench.sampler.seen[job.slot])
    assert np.isfinite(expected).all()

    def check(companions: int, budget: int, page_size: int, num_threads: int) -> None:
        others = [Job(prompt_of(3 + 5 * i, 10 + i), 2 + i % 5, arrives=i % 4) for i in range(companions)]
        with bench_of(model, page_size, num_threads, kv_dtype) as bench:
            run(bench, [*others, among := Job(probe, new_tokens, arrives=1)], budget)
            got = np.stack(bench.sampler.seen[among.slot][-new_tokens:])
        assert among.tokens == job.tokens
        assert np.array_equal(got, expected)

    # Pages of the same size throughout: a page's numbers are added up before they join the row's.
    for companions, budget, num_threads in ((0, 7, 1), (1, 32, 2), (7, 64, 1), (31, 50, 2), (31, 512, 1), (0, 512, 2)):
        check(companions, budget, 16, num_threads)

    for done in (1, 4):
        again = Job(probe, new_tokens, generated_before=job.tokens[:done])
        with bench_of(model, num_threads=2, kv_dtype=kv_dtype) as bench:
            run(bench, [Job(prompt_of(30, 4), 9), again], 40)
            got = np.stack(bench.sampler.seen[again.slot])
        assert again.tokens == job.tokens[done:]
        assert np.array_equal(got, expected[done:])


def test_what_comes_back_from_the_host_has_the_same_bits(directory: Path) -> None:
    """Pages as the fast path lays them out: what was preempted and swapped yields what it yields alone."""
    source = ModelSource(str(make_checkpoint(directory / "swapped", *FAMILY["llama"])), "directory", "swapped")
    executor = LoadedExecutor(source, "bfloat16", block_size=16, model_impl="fast", swap_space=1 << 20)
    sampled = {"temperature": 0.9, "frequency_penalty": 0.3}

    def requests() -> list[TokenizedRequest]:
        ids = np.random.default_rng(5).integers(3, VOCABULARY, (6, 30))
        return [greedy(i, ids[i].tolist(), 90, seed=i, **(sampled if i % 2 else {})) for i in range(6)]

    try:
        alone = EngineCore(executor, num_host_pages=0)
        for request in requests():
            alone.run([request])
        limits = {"num_pages": 24, "swap_bytes_per_second": 1e15}
        among = EngineCore(executor, SchedulerConfig(enable_prefix_caching=False), **limits)
        among.run(requests())
        assert among.stats is not None
        assert among.stats.swapped_in_tokens > 60
        assert among.stats.preempted_tokens == 0
        for key, generated in among.results.items():
            assert generated.token_ids == alone.results[key].token_ids
    finally:
        executor.actor.shutdown()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", ["qwen3", "llama-multi-query", "mistral-window"])
def test_long_sequences_are_shared_by_the_threads(directory: Path, name: str, kv_dtype: KVDType) -> None:
    """Beyond two spans of keys a lone sequence's are cut up: the same bits with one thread, two, and with others."""
    model = prepare(load_small(directory, name), kv_dtype=kv_dtype)
    probe, new_tokens = prompt_of(1019, 6), 10
    results = []
    for num_threads, companions in ((1, 0), (2, 0), (2, 1), (2, 9)):
        others = [Job(prompt_of(20 + 30 * i, 60 + i), 6, arrives=9 + i) for i in range(companions)]
        with bench_of(model, 16, num_threads, kv_dtype) as bench:
            run(bench, [job := Job(probe, new_tokens), *others], 256)
            results.append(np.stack(bench.sampler.seen[job.slot][-new_tokens:]))
            spans = int(bench.decoder._step[k.SPANS])
            assert companions or spans == (3 if num_threads > 1 else 0)  # of the last step
    assert np.isfinite(results[0]).all()
    for other in results[1:]:
        assert np.array_equal(other, results[0])


def test_the_largest_logit_is_found_on_the_way(qwen3: LoadedModel) -> None:
    """For any number of rows, with two threads; the vocabulary is no whole number of panels."""
    with bench_of(prepare(qwen3, "none"), num_threads=2) as bench:
        ids = np.random.default_rng(0).integers(3, VOCABULARY, (1, 40)).astype(np.int32)
        tables = np.arange(1, 5, dtype=np.int32)[None].copy()
        for wanted in ([3], [], [39, 0, 5], list(range(40))):
            rows = np.array(wanted, np.int32)
            slot, count, done = np.zeros(1, np.int32), np.array([40], np.int32), np.zeros(1, np.int64)
            logits = bench.decoder.forward(slot, count, done, ids, tables, rows)
            np.testing.assert_array_equal(bench.decoder.best_tokens(), logits.argmax(axis=1))


def test_windows_are_those_of_the_model(directory: Path) -> None:
    assert layer_windows(load_small(directory, "mistral-window").model) == [9, 9, 9]
    assert layer_windows(load_small(directory, "qwen2-sliding").model) == [0, 8, 8]
    assert layer_windows(load_small(directory, "llama").model) == [0, 0, 0]


def test_a_window_beyond_the_checks_sequences_is_served(directory: Path) -> None:
    """A long run through a sliding window, against the model's own eager pass."""
    loaded = load_small(directory, "mistral-window")
    model = prepare(loaded)
    prompt = prompt_of(90, 5)
    with bench_of(model) as bench:
        run(bench, [job := Job(prompt, 5)], 33)
        got = np.stack(bench.sampler.seen[job.slot])
    causal: Any = loaded.model
    causal.float()
    causal.config._attn_implementation = "eager"
    with torch.no_grad():
        ids = torch.tensor([[*prompt, *job.tokens[:-1]]])
        expected = causal(ids, use_cache=False).logits[0, len(prompt) - 1 :].numpy()
    assert np.sqrt(np.square(got - expected).mean()) < 0.03 * expected.std()


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("llama", {"head_dim": 24}, "head dimension 24"),
        ("llama", {"hidden_act": "gelu"}, "activation 'gelu'"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
        ("phi3", {}, "Phi3ForCausalLM is not one of"),
        ("gemma2", {}, "Gemma2ForCausalLM is not one of"),
    ],
)
def test_unknown_models_are_left_to_the_general_path(
    tmp_path: Path, name: str, changes: dict[str, Any], reason: str
) -> None:
    kind, arguments = SERVED[name]
    path = make_checkpoint(tmp_path / name, kind, {**arguments, **changes})
    loaded = load_model(ModelSource(str(path), "directory", name), "bfloat16", lambda stage, fraction: None)
    with pytest.raises(NotApplicableError, match=reason):
        decoder_shape(loaded.model)


def test_modules_that_were_exchanged_are_not_computed(directory: Path) -> None:
    """The classes' names do not count, their parts do."""
    loaded = load_small(directory, "llama")
    layer = loaded.model.model.layers[1]  # type: ignore[union-attr,index]

    class Adapted(torch.nn.Linear):
        """A layer that does more than a product."""

    layer.mlp.down_proj = Adapted(112, 64, bias=False)  # type: ignore[union-attr]
    with pytest.raises(NotApplicableError, match="linear layers"):
        decoder_shape(loaded.model)


def two_texts() -> list[list[int]]:
    """512 tokens each: a licence, and a piece of it twice, which the model knows the second time."""
    tokenizer = load_tokenizer(TokenizerSettings(default_model(), None, None)).backend
    licence = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")
    ids = tokenizer.encode(licence, add_special_tokens=False).ids
    return [ids[:512], ids[40:296] * 2]


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_keys_and_values_in_int8_keep_the_distribution(level: Any) -> None:
    """bfloat16 weights: pages in int8 against pages in bfloat16; docs/benchmarks.md has more texts."""
    loaded = load_model(default_model(), "bfloat16", lambda stage, fraction: None)
    texts, found = two_texts(), []
    for kv_dtype in KV_DTYPES:
        with bench_of(prepare(loaded, "none", level, kv_dtype), 64, kv_dtype=kv_dtype) as bench:
            found.append([_log_probabilities(bench, text) for text in texts])
    for exact, got, agreement in zip(*found, (0.97, 0.98), strict=True):
        assert (np.exp(exact) * (exact - got)).sum(axis=1).mean() <= 0.004
        assert (exact.argmax(axis=1) == got.argmax(axis=1)).mean() >= agreement


def _log_probabilities(bench: FastBench, text: list[int]) -> Any:
    """[tokens, vocabulary], computed in two chunks."""
    ids, tables = np.array([text], np.int32), np.arange(1, 17, dtype=np.int32)[None].copy()
    half = len(text) // 2
    logits = [
        bench.decoder.forward(
            np.zeros(1, np.int32),
            np.array([half], np.int32),
            np.array([start], np.int64),
            ids,
            tables,
            np.arange(half, dtype=np.int32),
        ).astype(np.float64)
        for start in (0, half)
    ]
    return torch.from_numpy(np.concatenate(logits)).log_softmax(-1).numpy()


def test_float32_and_small_pages_are_left_to_the_general_path(directory: Path) -> None:
    path = make_checkpoint(directory / "float32", *FAMILY["llama"])
    loaded = load_model(ModelSource(str(path), "directory", "llama"), "float32", lambda stage, fraction: None)
    with pytest.raises(NotApplicableError, match="not in float32"):
        prepare(loaded)
    loaded = load_small(directory, "llama")
    with pytest.raises(NotApplicableError, match="at least 16 tokens"):
        fast_startup.prepare_fast(loaded, "none", 8, 64, 1 << 40, lambda stage, fraction: None)


def test_the_check_reads_no_position_beyond_the_tables(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sequences may be longer than any that will be served."""
    loaded = load_small(directory, "llama")
    made: list[int] = []
    tables = Rotary.tables

    def recorded(rotary: Rotary, positions: int) -> Any:
        made.append(positions)
        return tables(rotary, positions)

    monkeypatch.setattr(Rotary, "tables", recorded)
    model = fast_startup.prepare_fast(loaded, "none", 16, 16, 1 << 40, lambda stage, fraction: None)
    assert made == [max(fast_startup.CHECK_LENGTHS)]
    assert model.max_positions == 16


def test_weights_that_did_not_pass_the_check_are_not_kept(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(directory / "kept", *FAMILY["llama"])
    source = ModelSource(str(path), "directory", "kept")
    settings = ExecutorSettings(source, "bfloat16", None, 4, None, ExecutorConfig(block_size=16))
    plan = plan_serving(settings, CPU, "bfloat16")

    def start() -> CpuModel:
        kept = KeptWeights("none", path, tmp_path / "weights")
        return load_and_check(settings, plan, 1, lambda: kept, lambda stage, fraction: None)

    with monkeypatch.context() as patch:
        patch.setitem(fast_startup.TOLERANCE, "none", 0.0)
        assert not isinstance(start().path, FastModel)
    assert not (tmp_path / "weights").exists()
    assert isinstance(start().path, FastModel)
    assert sorted(file.suffix for file in (tmp_path / "weights").iterdir()) == [".checked", ".weights"]


def test_a_machine_whose_threads_cannot_wait(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_startup, "FUTEX", -1)
    with pytest.raises(NotApplicableError, match="system call"):
        prepare(load_small(directory, "llama"))


def test_logits_take_no_more_memory_than_a_steps_tokens(qwen3: LoadedModel) -> None:
    """Log-probabilities of prompts ask for a row of logits for each token: no more than a step's budget, however many
    prompts there are and however long they are."""
    budget = 24
    sampling = msgspec.structs.replace(GREEDY, prompt_logprobs=2)
    jobs = [Job(prompt_of(40 + i, 50 + i), 1, sampling) for i in range(5)]
    with bench_of(prepare(qwen3)) as bench:
        run(bench, jobs, budget)
        rows = len(bench.decoder._logits)
    assert 8 < rows <= budget
    for job in jobs:
        counts = [count for part in job.prompt_logprobs for count in unpack_i32(part.columns.counts).tolist()]
        assert counts == [0, *[3] * (len(job.prompt) - 1)]


@pytest.mark.parametrize(("name", "tied"), [("llama", False), ("llama-tied-biases", True)])
def test_an_output_layer_in_int8_keeps_its_weights_for_the_largest_logits(
    directory: Path, name: str, tied: bool
) -> None:
    kind, arguments = FAMILY[name]
    path = make_checkpoint(directory / f"{name}-4001", kind, {**arguments, "vocab_size": 4001})
    loaded = load_model(ModelSource(str(path), "directory", name), "bfloat16", lambda stage, fraction: None)
    assert prepare(loaded).weights.exact_head is None
    model = prepare(loaded, "int8")
    exact = model.weights.exact_head
    assert exact is not None
    assert (exact is model.weights.embedding) == tied
    head = loaded.model.lm_head.weight.detach().view(torch.uint16).numpy()  # type: ignore[union-attr,operator]
    np.testing.assert_array_equal(exact[: len(head)], head)

    # With zeros in their place, the largest logits of every row, and they alone, become zeros.
    zeros = replace(model, weights=replace(model.weights, exact_head=np.zeros_like(exact)))
    ids, counts, wanted = (
        np.array([prompt_of(30, 1)], np.int32),
        np.array([30], np.int32),
        np.arange(30, dtype=np.int32),
    )
    found = []
    for each in (model, zeros):
        with bench_of(each, num_threads=2) as bench:
            table, slots, computed = np.array([[1, 2]], np.int32), np.zeros(1, np.int32), np.zeros(1, np.int64)
            logits = bench.decoder.forward(slots, counts, computed, ids, table, wanted).copy()
            np.testing.assert_array_equal(bench.decoder.best_tokens(), logits.argmax(axis=1))
            found.append(logits)
    right, without = found
    rescored = (without == 0) & (right != 0)
    assert (rescored.sum(axis=1) >= CANDIDATES).all()
    assert rescored.mean() < 0.1
    assert rescored[np.arange(30), right.argmax(axis=1)].all()
    np.testing.assert_array_equal(right[~rescored], without[~rescored])
