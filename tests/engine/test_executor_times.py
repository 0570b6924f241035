"""What the executor's time went into."""

from __future__ import annotations

import pytest
from scheduler_inputs import make_request
from timed_engine import TimedEngine

from ringserve.engine.executor_times import ExecutorTimes
from ringserve.messages.steps import ModelRunnerOutput


def result(received: int, started: int, sent: int) -> ModelRunnerOutput:
    return ModelRunnerOutput(0, b"", b"", None, (), received, started, sent)


def test_gaps_count_only_while_there_is_work() -> None:
    times = ExecutorTimes()
    times.on_result(result(100, 110, 200))
    times.on_planned(has_work=True)
    times.on_result(result(150, 205, 300))  # it had waited in the ring
    times.on_planned(has_work=True)
    times.on_result(result(340, 350, 400))  # it came late
    times.on_planned(has_work=False)
    times.on_result(result(900, 905, 1000))  # nobody had asked for anything
    assert times.idle_ns == 5 + 50
    assert times.busy_ns == 90 + 95 + 50 + 95


def test_a_steps_time_begins_where_the_executor_could_begin_it() -> None:
    times = ExecutorTimes()
    assert times.on_result(result(100, 110, 200)) == pytest.approx(100e-9)
    assert times.on_result(result(150, 205, 300)) == pytest.approx(100e-9)
    assert times.on_result(result(340, 350, 400)) == pytest.approx(60e-9)


def test_two_steps_ahead_leave_no_gap() -> None:
    """Chunked prompts, preemption and stops included, in simulated time: the next step is always there."""
    engine = TimedEngine(ready={"num_pages": 20, "max_num_seqs": 6, "max_num_batched_tokens": 32})
    for request_id in range(1, 12):
        engine.add(make_request(request_id, 30 + 5 * request_id, 60, ignore_eos=request_id % 2 == 0))
    engine.run()
    stats = engine.engine.scheduler.stats()
    assert stats.num_preemptions > 0
    assert stats.executor_busy_ns == pytest.approx(sum(engine.step_seconds) * 1e9, rel=1e-6)
    assert stats.executor_idle_ns < 0.01 * stats.executor_busy_ns


def test_an_idle_server_wastes_nothing() -> None:
    engine = TimedEngine()
    for request_id in range(1, 4):
        engine.add(make_request(request_id, 20, 5))
        engine.run()
        engine.run(engine.now + 10)
    assert engine.engine.scheduler.stats().executor_idle_ns == 0
