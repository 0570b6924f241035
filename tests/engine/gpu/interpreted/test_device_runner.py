"""The runner of a device, driven by the real scheduler: what the CPU's runner makes of the same logits."""

from __future__ import annotations

from itertools import accumulate
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from context_model import Patterns
from device_runners import VOCAB_SIZE, cpu_runner, device_runner, small_ready
from engine_core import greedy
from late_device import LateDevice
from runner_core import RunnerCore
from runner_steps import first_step

from ringserve.config import SchedulerConfig
from ringserve.engine.gpu.device_state import StateWidths
from ringserve.engine.scheduler_outputs import join_logprobs, split_logprobs
from ringserve.engine.swap_space import SwapCosts
from ringserve.messages.columns import pack_f32, pack_i32, unpack_f32
from ringserve.messages.logprobs import LogprobColumns
from ringserve.messages.requests import ResumedChoice, TokenizedRequest
from ringserve.messages.sampling import SamplingParams

PATTERNS = Patterns(VOCAB_SIZE)


def prompt_of(length: int, seed: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(3, VOCAB_SIZE, length).tolist()
    return ids


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_greedy(enforce_eager: bool) -> None:
    """Prompts in chunks beside others that decode, more requests than slots, two steps in flight."""
    ready = small_ready()
    core = RunnerCore(device_runner(ready, PATTERNS, enforce_eager=enforce_eager), ready)
    prompts = {i: prompt_of(length, i) for i, length in enumerate((1, 5, 31, 2, 17, 40, 3, 8))}
    core.run(greedy(i, prompt, 4 + i) for i, prompt in prompts.items())
    assert core.max_in_flight == 2
    for i, prompt in prompts.items():
        assert core.results[i, 0].token_ids == PATTERNS.greedy(prompt, 4 + i)


@pytest.mark.parametrize(("slots", "tokens"), [(1, 1), (1, 5), (2, 2), (3, 3)])
def test_the_smallest_limits(slots: int, tokens: int) -> None:
    """One slot, one token a step; sequences as long as they may be."""
    ready = small_ready(num_pages=5, max_num_seqs=slots, max_tokens=tokens, max_len=19)
    core = RunnerCore(device_runner(ready, PATTERNS), ready)
    prompts = [prompt_of(length, length) for length in (17, 1, 6)]
    core.run(greedy(i, prompt, 19 - len(prompt)) for i, prompt in enumerate(prompts))
    for i, prompt in enumerate(prompts):
        assert core.results[i, 0].token_ids == PATTERNS.greedy(prompt, 19 - len(prompt))


def test_closing_waits_for_what_is_under_way() -> None:
    ready, device = small_ready(), LateDevice()
    runner = device_runner(ready, PATTERNS, device)
    runner.submit(first_step([[5, 6, 7]]))
    assert device.num_done < device.num_submitted
    runner.close()
    assert device.num_done == device.num_submitted
    assert (runner.num_in_flight, runner.num_graphs) == (0, 0)


def sampling_of(random: Random) -> dict[str, Any]:
    """Anything that a request may ask for, in any combination."""
    sampling: dict[str, Any] = {"seed": random.getrandbits(64), "ignore_eos": random.random() < 0.3}
    sampling["temperature"] = random.choice([0.0, 0.7, 1.3])
    if random.random() < 0.4:
        sampling.update(top_k=random.choice([1, 5, 200]), top_p=random.choice([1.0, 0.8]), min_p=0.01)
    if random.random() < 0.4:
        sampling.update(repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=random.choice([0.0, 0.5]))
    if random.random() < 0.4:
        sampling.update(min_tokens=4, stop_token_ids=pack_i32(sorted(random.sample(range(VOCAB_SIZE), 20))))
    if random.random() < 0.4:
        ids = sorted(random.sample(range(VOCAB_SIZE + 5), random.choice([1, 7, 20])))
        sampling.update(logit_bias_ids=pack_i32(ids), logit_bias_values=pack_f32(random.uniform(-9, 9) for _ in ids))
    if random.random() < 0.4:
        sampling["logprobs"] = random.choice([0, 3, 17])
    if random.random() < 0.3:
        sampling["prompt_logprobs"] = random.choice([0, 2])
    return sampling


def request_of(request_id: int, random: Random) -> TokenizedRequest:
    prompt = [random.randrange(VOCAB_SIZE) for _ in range(random.choice([1, 2, 3, 9, 20, 33]))]
    if random.random() < 0.5:
        prompt = [*range(40, 52), *prompt]  # what the prefix cache finds
    n, max_tokens = random.choice([1, 1, 3]), random.choice([0, 1, 5, 12])
    resumed: tuple[ResumedChoice, ...] = ()
    if max_tokens > 1 and random.random() < 0.3:
        before = [random.randrange(3, VOCAB_SIZE) for _ in range(random.randrange(1, max_tokens))]
        resumed = (ResumedChoice(n - 1, pack_i32(before), 0),)
    sampling = SamplingParams(**sampling_of(random))
    return TokenizedRequest(request_id, pack_i32(prompt), sampling, n=n, max_tokens=max_tokens, resumed=resumed)


def assert_same_logprobs(got: LogprobColumns, expected: LogprobColumns) -> None:
    assert (got.counts, got.ranks) == (expected.counts, expected.ranks)
    assert got.token_ids == expected.token_ids
    assert unpack_f32(got.values).tolist() == pytest.approx(unpack_f32(expected.values).tolist(), abs=2e-5)


def assert_same(device: RunnerCore, cpu: RunnerCore) -> None:
    """Everything that clients see."""
    assert device.results.keys() == cpu.results.keys()
    for key, expected in cpu.results.items():
        got = device.results[key]
        assert (key, got.token_ids, got.reason) == (key, expected.token_ids, expected.reason)
        assert got.message == expected.message
        assert_same_logprobs(join_logprobs(got.logprobs), join_logprobs(expected.logprobs))

    def prompt_columns(core: RunnerCore, request_id: int) -> LogprobColumns:
        parts = core.prompt_logprobs[request_id]
        assert [part.start for part in parts] == [0, *accumulate(len(part.columns.counts) // 4 for part in parts)][:-1]
        return join_logprobs([entry for part in parts for entry in split_logprobs(part.columns)])

    assert device.prompt_logprobs.keys() == cpu.prompt_logprobs.keys()
    for request_id in cpu.prompt_logprobs:
        assert_same_logprobs(prompt_columns(device, request_id), prompt_columns(cpu, request_id))


@pytest.mark.parametrize("seed", range(4))
def test_anything_that_may_be_asked_for(seed: int) -> None:
    """Equal to the CPU's runner: tokens, ends, log probabilities; with columns that have to grow on the way, with
    sequences that fail."""
    random = Random(seed)
    ready = small_ready(max_tokens=24 if seed % 2 else 40)
    requests = [request_of(i, random) for i in range(10)]
    patterns = Patterns(VOCAB_SIZE, seed, poison=5 if seed == 3 else -1)
    config = SchedulerConfig(enable_prefix_caching=True)
    widths = StateWidths(ends=4, biases=16, logprobs=15)
    device = RunnerCore(device_runner(ready, patterns, widths=widths), ready, config)
    cpu = RunnerCore(cpu_runner(ready, patterns), ready, config)
    for core in (device, cpu):
        core.run(requests)
    assert_same(device, cpu)
    reasons = {came.reason for came in cpu.results.values()}
    assert ("error" in reasons) == (seed == 3)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.5}])
def test_preempted_sequences_go_on_as_they_would_have(sampling: dict[str, Any]) -> None:
    """They are sent again, with what they generated: state on the device is rebuilt from that."""
    ready = small_ready(num_pages=16, max_num_seqs=4)
    requests = [greedy(i, prompt_of(4 + i, i), 20, **{"seed": i, **sampling}) for i in range(5)]
    device = RunnerCore(device_runner(ready, PATTERNS), ready)
    cpu = RunnerCore(cpu_runner(ready, PATTERNS), ready)
    for core in (device, cpu):
        core.run(requests)
    assert_same(device, cpu)
    assert device.scheduler.num_preemptions > 0


def test_sequences_that_are_swapped_go_on_as_they_would_have() -> None:
    """Their pages come back in the same step that reads them; transfers and compute are as late as they may be."""
    ready = msgspec.structs.replace(small_ready(num_pages=16, max_num_seqs=4), num_host_pages=20)
    free_of_charge = SwapCosts(bytes_per_page=1, bytes_per_second=1e30, seconds_per_swap=0.0)
    core = RunnerCore(device_runner(ready, PATTERNS), ready, swap_costs=free_of_charge)
    prompts = {i: prompt_of(4 + i, i) for i in range(6)}
    core.run(greedy(i, prompt, 20) for i, prompt in prompts.items())
    for i, prompt in prompts.items():
        assert core.results[i, 0].token_ids == PATTERNS.greedy(prompt, 20)
    stats = core.scheduler.stats()
    assert stats.swapped_out_pages > 0
    assert stats.swapped_in_tokens > 0


def test_anything_that_may_be_asked_for_of_swapped_sequences() -> None:
    """Thrown out by more urgent ones and for want of pages, beside what the prefix cache finds: equal to the CPU's
    runner with pages for all."""
    random = Random(40)
    requests = [
        msgspec.structs.replace(request_of(i, random), priority=-i % 4, max_tokens=12, resumed=()) for i in range(8)
    ]
    plenty = small_ready(num_pages=200)
    tight = msgspec.structs.replace(small_ready(num_pages=16, max_num_seqs=4), num_host_pages=40)
    config = SchedulerConfig(scheduling_policy="priority", priority_aging=0, preemption_resume_steps=0)
    free_of_charge = SwapCosts(bytes_per_page=1, bytes_per_second=1e30, seconds_per_swap=0.0)
    device = RunnerCore(device_runner(tight, PATTERNS), tight, config, free_of_charge)
    for request in requests:
        device.add(request)
        for _ in range(random.randrange(4)):
            device.turn()
    device.run()
    cpu = RunnerCore(cpu_runner(plenty, PATTERNS), plenty)
    cpu.run(requests)
    assert_same(device, cpu)
    stats = device.scheduler.stats()
    assert stats.swapped_in_pages > 3
    assert stats.num_swapped_pages == 0


def test_requests_that_are_aborted_leave_nothing_behind() -> None:
    """Slots and pages are given away while steps of their former owners are under way."""
    ready = small_ready(num_pages=30, max_num_seqs=3)
    core = RunnerCore(device_runner(ready, PATTERNS), ready)
    prompts = [prompt_of(3 + 5 * i, 50 + i) for i in range(6)]
    core.add(*(greedy(i, prompt, 9) for i, prompt in enumerate(prompts)))
    for request_id in (0, 2, 1):
        for _ in range(3):
            core.turn()
        core.scheduler.abort(request_id)
    core.run()
    for i in (3, 4, 5):
        assert core.results[i, 0].token_ids == PATTERNS.greedy(prompts[i], 9)
