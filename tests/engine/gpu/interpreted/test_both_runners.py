"""What every runner owes the scheduler, the CPU's and a device's alike."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from context_model import Patterns
from device_runners import PAGE_SIZE, VOCAB_SIZE, cpu_runner, device_runner, small_ready
from runner_steps import decode_step, first_step
from step_planner import GREEDY, Job, StepPlanner

from ringserve.engine.gpu.device_runner import DeviceRunner
from ringserve.engine.model_runner import ModelRunner
from ringserve.engine.sampler import NO_FINITE_LOGIT
from ringserve.messages.columns import pack_f32, pack_i32, unpack_f32, unpack_i32
from ringserve.messages.sampling import SamplingParams
from ringserve.messages.steps import ModelRunnerOutput, NewSequence, SchedulerOutput

POISON = 96
PATTERNS = Patterns(VOCAB_SIZE, poison=POISON)

AnyRunner = ModelRunner | DeviceRunner


def make_device_runner() -> DeviceRunner:
    return device_runner(small_ready(), PATTERNS, warm=False)


def make_cpu_runner() -> ModelRunner:
    return cpu_runner(small_ready(), PATTERNS)


both = pytest.mark.parametrize("make", [make_cpu_runner, make_device_runner], ids=["cpu", "device"])
Make = Callable[[], AnyRunner]


def rows_of(output: ModelRunnerOutput) -> list[tuple[int, int]]:
    return list(zip(unpack_i32(output.slots), unpack_i32(output.token_ids), strict=True))


def step(
    number: int, rows: list[tuple[int, int, list[int]]], new: tuple[NewSequence, ...] = (), freed: tuple[int, ...] = ()
) -> SchedulerOutput:
    """Rows: (slot, tokens, new pages)."""
    return SchedulerOutput(
        step_id=number,
        new_sequences=new,
        slots=pack_i32(slot for slot, _, _ in rows),
        num_tokens=pack_i32(count for _, count, _ in rows),
        new_page_counts=pack_i32(len(pages) for _, _, pages in rows),
        new_pages=pack_i32(page for _, _, pages in rows for page in pages),
        freed_slots=pack_i32(freed),
    )


def sequence(slot: int, ids: list[int], max_tokens: int = 20, **sampling: int) -> NewSequence:
    return NewSequence(slot, pack_i32(ids), len(ids), 0, 0, msgspec.structs.replace(GREEDY, **sampling), max_tokens)


@both
def test_result_rows_follow_the_step_and_its_times(make: Make) -> None:
    runner = make()
    new = (sequence(5, [9, 8, 7]), sequence(2, list(range(10, 17))), sequence(3, [4], max_tokens=0))
    output = runner.execute(step(1, [(5, 3, [1]), (2, 4, [2]), (3, 1, [3])], new), received_ns=17)
    assert rows_of(output) == [(5, PATTERNS.greedy([9, 8, 7], 1)[0])]  # 2 is in its prompt, 3 samples nothing
    assert output.received_ns == 17
    assert 17 < output.started_ns <= output.sent_ns
    assert output.step_id == 1
    # 2 comes to its end behind 5, which decodes; both are in the step's order.
    output = runner.execute(step(2, [(2, 3, [4]), (5, 1, [])], freed=(3,)))
    assert rows_of(output) == [
        (2, PATTERNS.greedy(list(range(10, 17)), 1)[0]),
        (5, PATTERNS.greedy([9, 8, 7], 2)[1]),
    ]
    assert rows_of(runner.execute(step(3, [], freed=(2, 5)))) == []


@both
def test_pages_and_slots_are_reused_at_once(make: Make) -> None:
    runner = make()
    ids = list(range(20, 27))
    runner.execute(step(1, [(0, 7, [3, 1])], (sequence(0, ids),)))
    runner.execute(step(2, [(0, 1, [])]))
    got = runner.execute(step(3, [(0, 4, [1])], (sequence(0, [50, 51, 52, 53]),), freed=(0,)))
    assert rows_of(got) == [(0, PATTERNS.greedy([50, 51, 52, 53], 1)[0])]


@both
@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([(0, 2, [])], "2 tokens after 7 of 8 known ones"),
        ([(1, 1, [])], "nobody"),
        ([(0, 0, [])], "0 tokens"),
    ],
)
def test_a_step_that_does_not_fit_raises(make: Make, rows: list[tuple[int, int, list[int]]], reason: str) -> None:
    runner = make()
    runner.execute(step(1, [(0, 7, [1, 2])], (sequence(0, list(range(20, 27))),)))
    with pytest.raises(RuntimeError, match=reason):
        runner.execute(step(2, rows))


@both
def test_a_step_without_pages_for_its_tokens_raises(make: Make) -> None:
    with pytest.raises(RuntimeError, match=f"2 pages of {PAGE_SIZE}"):
        make().execute(step(1, [(0, 9, [1, 2])], (sequence(0, list(range(20, 29))),)))


@pytest.mark.parametrize(
    ("rows", "new", "reason"),
    [
        ([(6, 3, [1])], (sequence(6, [5, 6, 7]),), "slot 6 of 6"),
        ([(0, 25, list(range(1, 8)))], (sequence(0, list(range(25))),), "a step of 25 tokens; there is room for 24"),
        ([(0, 3, list(range(1, 18)))], (sequence(0, [5, 6, 7]),), "a block table of 17 pages; there is room for 16"),
    ],
)
def test_more_than_a_device_has_room_for(
    rows: list[tuple[int, int, list[int]]], new: tuple[NewSequence, ...], reason: str
) -> None:
    """The scheduler was told the limits: the two processes disagree."""
    with pytest.raises(RuntimeError, match=reason):
        make_device_runner().execute(step(1, rows, new))


@both
def test_logits_that_are_not_finite_fail_one_sequence_only(make: Make) -> None:
    """Of its later rows, planned before that was known, nothing is heard; whoever has its slot next is not
    concerned."""
    runner = make()
    new = (sequence(0, [POISON, 20], logprobs=1), sequence(1, [30, 31]))
    output = runner.execute(step(1, [(0, 2, [1]), (1, 2, [2])], new))
    assert output.failed_slots == ((0, NO_FINITE_LOGIT),)
    assert output.logprobs is None
    assert rows_of(output) == [(1, PATTERNS.greedy([30, 31], 1)[0])]
    output = runner.execute(step(2, [(0, 1, []), (1, 1, [])]))
    assert output.failed_slots == ()
    assert rows_of(output) == [(1, PATTERNS.greedy([30, 31], 2)[1])]
    output = runner.execute(step(3, [(0, 2, [3])], (sequence(0, [7, 8]),), freed=(0,)))
    assert rows_of(output) == [(0, PATTERNS.greedy([7, 8], 1)[0])]


def test_a_failure_does_not_reach_the_slot_s_next_owner() -> None:
    """The failure, what was planned before it was known, and the next owner's first step, all under way at once."""
    runner = make_device_runner()
    runner.submit(step(1, [(0, 2, [1])], (sequence(0, [POISON, 20]),)))
    runner.submit(step(2, [(0, 1, [])]))
    runner.submit(step(3, [(0, 2, [3])], (sequence(0, [7, 8]),), freed=(0,)))
    assert runner.collect().failed_slots == ((0, NO_FINITE_LOGIT),)
    output = runner.collect()
    assert (output.failed_slots, rows_of(output)) == ((), [])
    assert rows_of(runner.collect()) == [(0, PATTERNS.greedy([7, 8], 1)[0])]


@both
def test_more_log_probabilities_than_tokens(make: Make) -> None:
    """As many as the vocabulary has, of the prompt as of the answer."""
    runner = make()
    output = runner.execute(first_step([[5, 6]], logprobs=500, prompt_logprobs=300))
    assert output.logprobs is not None
    assert unpack_i32(output.logprobs.counts).tolist() == [1 + VOCAB_SIZE]
    (part,) = output.prompt_logprobs
    assert (part.start, unpack_i32(part.columns.counts).tolist()) == (0, [0, 1 + VOCAB_SIZE])
    assert sorted(unpack_i32(part.columns.token_ids)[1:]) == list(range(VOCAB_SIZE))
    assert unpack_f32(part.columns.values).tolist()[1:] == sorted(unpack_f32(part.columns.values)[1:], reverse=True)


@both
def test_a_bias_for_every_token_and_an_end_that_is_hidden(make: Make) -> None:
    """More entries than the device has columns for at first; min_tokens hides all tokens but two."""
    runner = make()
    ids = list(range(VOCAB_SIZE))
    bias = {"logit_bias_ids": pack_i32(ids), "logit_bias_values": pack_f32([0.0] * 60 + [50.0] + [0.0] * 36)}
    ends = pack_i32([i for i in ids if i not in (17, 60)])
    output = runner.execute(first_step([[5, 6], [7]], **bias, min_tokens=2, stop_token_ids=ends))
    assert [token for _, token in rows_of(output)] == [60, 60]
    assert [token for _, token in rows_of(runner.execute(decode_step(1, [1, 0])))] == [60, 60]


@both
def test_seeds_have_64_bits(make: Make) -> None:
    """The upper ones count, the highest one too."""
    tokens = set()
    for seed in (1, 1 + (1 << 32), 1 + (1 << 63), (1 << 64) - 1):
        runner = make()
        parameters = SamplingParams(seed=seed, temperature=3.0, ignore_eos=True)
        jobs = [Job([5, 6, 7], 5, parameters, choice=choice) for choice in range(2)]
        StepPlanner(runner, 60, PAGE_SIZE, 6, 24).run(jobs)
        tokens |= {tuple(job.tokens) for job in jobs}
    assert len(tokens) == 8


@pytest.mark.parametrize("seed", [(1 << 64) - 1, 1 << 63, 12345678901234567890])
def test_both_draw_the_same(seed: int) -> None:
    found = []
    for make in (make_cpu_runner, make_device_runner):
        job = Job([5, 6, 7], 6, SamplingParams(seed=seed, temperature=1.5, top_p=0.9, ignore_eos=True), choice=2)
        StepPlanner(make(), 60, PAGE_SIZE, 6, 24).run([job])
        found.append(job.tokens)
    assert found[0] == found[1]
