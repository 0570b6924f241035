"""Prompts get what keeps the sequences that decode on time."""

from __future__ import annotations

from itertools import pairwise
from statistics import quantiles
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_inputs import make_request
from timed_engine import COSTS, SECOND, TimedEngine

from ringserve.engine.prompt_chunks import SMALLEST_CHUNK, PromptChunks
from ringserve.engine.step_time import StepCosts, StepShape
from ringserve.messages.columns import unpack_i32
from ringserve.messages.requests import ServiceTargets

LONG = 4000


def load(with_prompt: bool, budget: int, **config: Any) -> tuple[list[float], float]:
    """(gaps between tokens of eight streams, TTFT of a long prompt among them)."""
    engine = TimedEngine(
        ready={"num_pages": 400, "max_num_batched_tokens": budget, "max_num_seqs": 9, "max_model_len": 6000}, **config
    )
    for request_id in range(900, 906):  # what a step takes is learnt from a few prompts
        engine.add(make_request(request_id, 300, 5))
        engine.run()
    for request_id in range(1, 9):
        engine.add(make_request(request_id, 20, 250))
    engine.run(engine.now + 1)
    began = engine.now
    if with_prompt:
        engine.add(make_request(9, LONG, 1))
    engine.run()
    gaps = [gap for request_id in range(1, 9) for gap in engine.gaps(request_id)[40:]]
    return gaps, engine.token_times[9, 0][0] - began if with_prompt else 0.0


def alone(budget: int) -> float:
    engine = TimedEngine(ready={"num_pages": 400, "max_num_batched_tokens": budget, "max_model_len": 6000})
    engine.add(make_request(9, LONG, 1))
    engine.run()
    return engine.token_times[9, 0][0] - 1.0


def p99(values: list[float]) -> float:
    return quantiles(values, n=100)[98]


def test_a_target_keeps_streams_going_and_the_prompt_too() -> None:
    base, _ = load(False, 512)
    target = 1.8 * p99(base)
    gaps, ttft = load(True, 512, target_itl_ms=target * 1e3)
    assert p99(gaps) <= 2 * p99(base)
    assert ttft <= 3 * alone(512)


def test_a_fixed_budget_does_not() -> None:
    base, _ = load(False, 512)
    gaps, _ = load(True, 512)
    assert p99(gaps) > 4 * p99(base)


def test_a_request_can_set_the_target_for_the_time_it_runs() -> None:
    engine = TimedEngine(ready={"num_pages": 400, "max_num_batched_tokens": 512, "max_model_len": 6000})
    for request_id in range(900, 906):
        engine.add(make_request(request_id, 300, 5))
        engine.run()
    engine.add(make_request(1, 20, 60, targets=ServiceTargets(time_per_token_ns=SECOND // 20)))
    engine.add(make_request(2, LONG, 1))
    engine.run()
    assert max(engine.gaps(1)[1:]) < 0.055
    assert max(engine.step_seconds) > 0.2  # after it


def test_a_target_that_cannot_be_kept_starves_no_prompt() -> None:
    gaps, ttft = load(True, 512, target_itl_ms=0.001)
    assert ttft > 0
    assert max(gaps) < 0.1


def test_nobody_is_thrown_out_for_one_that_the_target_does_not_let_start() -> None:
    engine = TimedEngine(
        ready={"num_pages": 400, "max_num_batched_tokens": 512, "max_model_len": 6000, "max_num_seqs": 3},
        target_itl_ms=0.001,
        scheduling_policy="priority",
    )
    for request_id in range(900, 906):
        engine.add(make_request(request_id, 300, 5))
        engine.run()
    for request_id, priority in ((1, 9), (2, 0)):
        engine.add(make_request(request_id, 20, 400, priority=priority))
    engine.run(engine.now + 0.5)
    engine.add(make_request(3, 200, 1, priority=0))
    engine.run(engine.now + 0.1)
    engine.add(make_request(4, 50, 1, priority=1))
    in_prompt = engine.engine.scheduler._book.requests[3].live[0]
    while in_prompt.num_computed_tokens < 200:  # it takes what little the target leaves to prompts
        assert engine.engine.scheduler.num_preemptions == 0
        engine.advance()
    engine.run()
    assert engine.engine.choices[4, 0].finishes[0].reason == "length"
    assert engine.engine.choices[1, 0].finishes[0].num_preemptions <= 1


def test_nobody_decodes_nobody_waits() -> None:
    engine = TimedEngine(
        ready={"num_pages": 400, "max_num_batched_tokens": 512, "max_model_len": 6000}, target_itl_ms=20
    )
    for request_id in range(900, 906):
        engine.add(make_request(request_id, 300, 5))
        engine.run()
    first = len(engine.engine.steps)
    engine.add(make_request(1, 2000, 1))
    engine.run()
    sizes = [sum(unpack_i32(step.num_tokens)) for step in engine.engine.steps[first:]]
    assert sizes == [512, 512, 512, 464]


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    num_decoding=st.integers(1, 64),
    context=st.integers(1, 100_000),
    computed=st.lists(st.integers(0, 50_000), min_size=1, max_size=4),
    seconds=st.floats(1e-4, 1.0),
    pair=st.sampled_from([0.0, 1e-8, 1e-6]),
)
def test_chunks_are_as_large_as_the_time_allows(
    num_decoding: int, context: int, computed: list[int], seconds: float, pair: float
) -> None:
    costs = StepCosts(*(1e-3, 1e-5, 1e-4, 0.0, 1e-8), pair)
    shape = StepShape(num_decoding, num_decoding, 0, context)
    chunks = PromptChunks(costs, shape, seconds)
    taken = 0
    for num_computed in computed:
        tokens = chunks.limit(num_computed)
        assert tokens >= max(0, SMALLEST_CHUNK - taken)
        if tokens > max(1, SMALLEST_CHUNK - taken):
            assert costs.predict(shape.with_chunk(num_computed, tokens)) <= seconds * 1.0001
            assert costs.predict(shape.with_chunk(num_computed, tokens + 1)) >= seconds * 0.9999
        if tokens:
            chunks.take(num_computed, tokens)
            shape = shape.with_chunk(num_computed, tokens)
            taken += tokens


def test_the_clock_of_these_tests_runs() -> None:
    """Steps take what the model says, one after the other."""
    engine = TimedEngine()
    engine.add(make_request(1, 20, 10))
    engine.run()
    assert engine.gaps(1) == pytest.approx([later - earlier for earlier, later in pairwise(engine.token_times[1, 0])])
    assert sum(engine.step_seconds) == pytest.approx(engine.now - 1.0, rel=1e-3)
    assert engine.step_seconds[0] == pytest.approx(COSTS.predict(StepShape.of([(0, 20)])))
