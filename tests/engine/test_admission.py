"""Refusals for want of time and room, and what they say."""

from __future__ import annotations

from typing import Any

import pytest
from scheduler_inputs import executor_ready, make_request
from scheduler_simulation import Engine
from timed_engine import SECOND, TimedEngine

from ringserve.config import SchedulerConfig
from ringserve.engine.sequence import Sequence
from ringserve.engine.wait_prediction import Prediction
from ringserve.messages.columns import pack_i32
from ringserve.messages.requests import RequestRefused, ResumedChoice, ServiceTargets


def warmed_up(ready: dict[str, int] | None = None, **config: Any) -> TimedEngine:
    """An engine whose step times are known."""
    engine = TimedEngine(ready=ready, **config)
    for request_id in range(900, 904):
        engine.add(make_request(request_id, 40, 10))
        engine.run()
    assert engine.engine.scheduler.step_times.is_fitted
    return engine


def code_of(refused: RequestRefused | None) -> str | None:
    return None if refused is None else refused.code


# -------------------------------------------------------------------------------------------------- bounds


def test_queued_prompt_tokens_are_bounded() -> None:
    engine = Engine(executor_ready(max_num_seqs=1), config=SchedulerConfig(max_num_queued_tokens=100))
    engine.add(make_request(1, 200, 20))  # nothing waits: any size
    engine.schedule()
    assert engine.add(make_request(2, 60, 5)) is None
    refused = engine.add(make_request(3, 41, 5))
    assert refused is not None
    assert (refused.status, refused.code) == (503, "max_num_queued_tokens")
    assert "60 prompt tokens" in refused.message
    assert "the 41" in refused.message
    assert "100" in refused.message
    assert engine.add(make_request(4, 40, 5)) is None
    engine.run()
    assert engine.add(make_request(5, 300, 5)) is None
    engine.run()
    engine.check_empty()


def test_a_preempted_sequence_is_not_queued_again() -> None:
    """Its prompt was admitted; only what never ran counts."""
    ready = executor_ready(page_size=16, num_pages=8, max_num_seqs=4)
    engine = Engine(ready, config=SchedulerConfig(max_num_queued_tokens=30))
    engine.add(make_request(1, 20, 100))
    engine.schedule()
    engine.add(make_request(2, 20, 100))
    while not engine.scheduler.num_preemptions:
        engine.schedule()
        engine.deliver()
    assert engine.scheduler.stats().num_waiting == 1
    assert engine.add(make_request(3, 30, 5)) is None


def test_each_tenant_has_its_bound() -> None:
    engine = Engine(executor_ready(max_num_seqs=1), config=SchedulerConfig(max_num_queued_per_tenant=2))
    engine.add(make_request(1, 5, 20, tenant="a"))
    engine.schedule()
    for request_id in (2, 3):
        assert engine.add(make_request(request_id, 5, 5, tenant="a")) is None
    assert code_of(engine.add(make_request(4, 5, 5, tenant="a"))) == "max_num_queued_per_tenant"
    assert engine.add(make_request(5, 5, 5, tenant="b")) is None
    assert code_of(engine.add(make_request(6, 5, 5, n=2, tenant="b"))) == "max_num_queued_per_tenant"
    engine.abort(2)
    assert engine.add(make_request(7, 5, 5, tenant="a")) is None


def test_the_status_is_a_setting() -> None:
    config = SchedulerConfig(max_num_queued_per_tenant=1, overload_status=429)
    engine = Engine(executor_ready(max_num_seqs=1), config=config)
    engine.add(make_request(1, 5, 5))
    refused = engine.add(make_request(2, 5, 5))
    assert refused is not None
    assert (refused.status, refused.type) == (429, "rate_limit_error")
    assert refused.retry_after == 1.0  # nothing is known yet
    assert refused.predicted_wait is None


def test_what_was_begun_elsewhere_is_not_refused() -> None:
    engine = Engine(executor_ready(max_num_seqs=1), config=SchedulerConfig(max_num_queued_per_tenant=1))
    engine.add(make_request(1, 5, 5))
    assert engine.add(make_request(2, 5, 5, resumed=(ResumedChoice(0, pack_i32([7]), 0),))) is None


# --------------------------------------------------------------------------------------------- predictions


def test_the_predicted_wait_is_about_right() -> None:
    """One slot, four answers of 100 tokens ahead, lengths known from experience."""
    engine = TimedEngine(ready={"max_num_seqs": 1}, max_predicted_wait=0.001)
    for request_id in range(900, 903):
        engine.add(make_request(request_id, 40, 100))
        engine.run()
    assert engine.add(make_request(1, 40, 100)) is None
    began = engine.now
    refused = engine.add(make_request(2, 40, 100))
    assert refused is not None
    assert refused.code == "max_predicted_wait"
    assert refused.predicted_wait is not None
    engine.run()
    assert refused.predicted_wait == pytest.approx(engine.now - began, rel=0.15)
    assert refused.retry_after == refused.predicted_wait


def test_a_long_queue_is_predicted_through_slots_and_prompts() -> None:
    engine = TimedEngine(ready={"max_num_seqs": 2, "num_pages": 200, "max_num_batched_tokens": 32})
    scheduler = engine.engine.scheduler
    for request_id in range(900, 910):
        engine.add(make_request(request_id, 100, 50))
    engine.run()
    for request_id in range(1, 11):
        engine.add(make_request(request_id, 100, 50))
    waiting = make_request(11, 100, 50)
    prediction_for = scheduler._gate.predict
    began = engine.now
    engine.add(waiting)
    sequence = scheduler._book.requests[11].live[0]
    prediction = prediction_for(sequence)
    assert prediction is not None
    engine.run()
    first_token = engine.token_times[11, 0][0] - began
    assert prediction.first_token == pytest.approx(first_token, rel=0.25)
    assert prediction.finish == pytest.approx(engine.token_times[11, 0][-1] - began, rel=0.25)


def test_few_pages_make_few_slots() -> None:
    """Sequences of eight pages in a pool of ten run one after the other, whatever the slots."""
    engine = TimedEngine(ready={"max_num_seqs": 8, "num_pages": 10})
    for request_id in range(900, 903):
        engine.add(make_request(request_id, 70, 55))
    engine.run()
    scheduler = engine.engine.scheduler
    engine.add(make_request(1, 70, 55))
    began = engine.now
    engine.add(make_request(2, 70, 55))
    prediction = scheduler._gate.predict(scheduler._book.requests[2].live[0])
    assert prediction is not None
    engine.run()
    assert prediction.first_token == pytest.approx(engine.token_times[2, 0][0] - began, rel=0.3)


def test_without_measurements_nobody_is_refused_for_a_prediction() -> None:
    engine = TimedEngine(ready={"max_num_seqs": 1}, max_predicted_wait=1e-6)
    engine.add(make_request(1, 40, 100))
    assert engine.add(make_request(2, 40, 100)) is None


def test_answers_are_expected_as_long_as_they_have_been() -> None:
    """max_tokens is a limit, hardly a forecast."""
    engine = warmed_up({"max_num_seqs": 1})
    engine.add(make_request(1, 40, 400, stop_token_ids=tuple(range(40))))  # over after one token
    scheduler = engine.engine.scheduler
    sequence = scheduler._book.requests[1].live[0]
    assert scheduler._gate._predictor.expected_answer(sequence.request) == pytest.approx(10, abs=2)


# ------------------------------------------------------------------------------------ deadlines and timeouts


def due(engine: TimedEngine, finish: float = 0, first: float = 0, per_token: float = 0) -> ServiceTargets:
    """Seconds from now."""
    return ServiceTargets(
        engine.now_ns + int(finish * SECOND) if finish else 0,
        engine.now_ns + int(first * SECOND) if first else 0,
        int(per_token * SECOND),
    )


@pytest.mark.parametrize("policy", ["fcfs", "priority", "deadline", "fair"])
def test_a_deadline_out_of_reach_is_refused_at_once(policy: str) -> None:
    engine = warmed_up({"max_num_seqs": 1}, scheduling_policy=policy)
    engine.add(make_request(1, 40, 100))
    # About 10 tokens are expected, each of about 12 ms, and the prompt before them.
    refused = engine.add(make_request(2, 40, 100, targets=due(engine, finish=0.05)))
    assert refused is not None
    assert refused.code == "deadline_unreachable"
    assert "predicted in" in refused.message
    assert "due in" in refused.message
    assert engine.add(make_request(3, 40, 100, targets=due(engine, finish=60))) is None
    for targets in (due(engine, first=0.02), due(engine, per_token=0.001)):
        assert code_of(engine.add(make_request(4, 40, 100, targets=targets))) == "deadline_unreachable"
    assert engine.add(make_request(5, 40, 10, targets=due(engine, first=60, per_token=0.1))) is None
    engine.run()
    engine.engine.check_empty()


def test_a_cached_prompt_is_predicted_as_one() -> None:
    ready = {"max_num_seqs": 2, "num_pages": 100, "max_num_batched_tokens": 16}
    engine = warmed_up(ready)
    engine.add(make_request(1, 400, 2, family=7, num_shared_tokens=400))
    engine.run()
    targets = due(engine, first=0.1)
    assert code_of(engine.add(make_request(2, 400, 2, targets=targets))) == "deadline_unreachable"
    assert engine.add(make_request(3, 400, 2, family=7, num_shared_tokens=400, targets=due(engine, first=0.1))) is None
    engine.run()


def test_a_deadline_that_has_passed_is_refused_even_without_measurements() -> None:
    engine = TimedEngine()
    refused = engine.add(make_request(1, 5, 5, targets=ServiceTargets(due_ns=1)))
    assert code_of(refused) == "deadline_unreachable"


def test_who_waits_past_its_deadline_is_not_begun() -> None:
    engine = TimedEngine(ready={"max_num_seqs": 1})
    engine.add(make_request(1, 40, 300))
    assert engine.add(make_request(2, 40, 5, n=2, targets=due(engine, finish=1.0))) is None  # nothing is known yet
    engine.run()
    (refused,) = engine.engine.refusals
    assert (refused.request_id, refused.code) == (2, "deadline_unreachable")
    assert refused.predicted_wait is not None
    assert (2, 0) not in engine.engine.choices
    engine.engine.check_empty()


def test_who_waits_too_long_is_refused() -> None:
    engine = TimedEngine(ready={"max_num_seqs": 1}, queue_timeout=1.0)
    engine.add(make_request(1, 40, 300))
    began = engine.now
    engine.run(began + 0.5)
    engine.add(make_request(2, 40, 5))
    engine.run(began + 1.4)
    assert engine.engine.refusals == []
    engine.run(began + 1.7)
    (refused,) = engine.engine.refusals
    assert (refused.request_id, refused.status, refused.code) == (2, 503, "queue_timeout")
    engine.run()
    assert len(engine.engine.choices[1, 0].tokens) == 300
    engine.engine.check_empty()


def test_who_has_begun_is_finished() -> None:
    """Neither the timeout nor a deadline ends what runs, was preempted, or lacks only some of its choices."""
    engine = TimedEngine(
        ready={"max_num_seqs": 2, "num_pages": 8, "page_size": 16}, queue_timeout=0.2, enable_prefix_caching=False
    )
    engine.add(make_request(1, 20, 100))
    engine.add(make_request(2, 20, 100, targets=due(engine, finish=1.0)))
    engine.add(make_request(3, 20, 30, n=3))
    engine.run()
    assert engine.engine.choices[2, 0].finishes[0].num_preemptions > 0
    assert len(engine.engine.choices[2, 0].tokens) == 100
    assert [refused.request_id for refused in engine.engine.refusals] == [3]
    engine.engine.check_empty()


def test_an_abort_before_the_timeout_is_an_abort() -> None:
    engine = TimedEngine(ready={"max_num_seqs": 1}, queue_timeout=0.1)
    engine.add(make_request(1, 40, 100))
    engine.add(make_request(2, 40, 5))
    engine.engine.abort(2)
    engine.run()
    assert engine.engine.refusals == []
    assert engine.engine.choices[2, 0].finishes[0].reason == "abort"
    engine.engine.check_empty()


def test_many_are_sent_away_at_the_price_of_a_few() -> None:
    """A prediction looks at the whole queue; where a crowd has waited too long, what runs must not wait for as many."""
    engine = warmed_up({"max_num_seqs": 1}, queue_timeout=1.0)
    gate = engine.engine.scheduler._gate
    engine.add(make_request(1, 40, 200))
    for request_id in range(2, 82):
        assert engine.add(make_request(request_id, 5, 5)) is None
    predicted = []
    predict = gate.predict

    def counted(sequence: Sequence) -> Prediction | None:
        predicted.append(sequence)
        return predict(sequence)

    gate.predict = counted  # type: ignore[method-assign]
    engine.run()
    assert [refused.request_id for refused in engine.engine.refusals] == list(range(2, 82))
    assert all(refused.predicted_wait for refused in engine.engine.refusals)
    assert len(predicted) <= 8
    engine.engine.check_empty()
