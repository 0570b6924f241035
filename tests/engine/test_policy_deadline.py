"""Earliest deadline first."""

from __future__ import annotations

import pytest
from scheduler_inputs import executor_ready, make_request
from scheduler_simulation import Engine
from timed_engine import SECOND, TimedEngine

from ringserve.config import SchedulerConfig
from ringserve.messages.requests import ServiceTargets


def engine_of(ready: dict[str, int] | None = None, default_deadline: float = 60.0) -> Engine:
    config = SchedulerConfig(scheduling_policy="deadline", default_deadline=default_deadline)
    return Engine(executor_ready(**(ready or {})), config=config)


def due(finish: float = 0, first: float = 0) -> ServiceTargets:
    """Seconds on the engine's clock."""
    return ServiceTargets(int(finish * SECOND), int(first * SECOND))


def starts(engine: Engine) -> list[int]:
    return [new.sampling.seed for step in engine.steps for new in step.new_sequences]


def test_the_earliest_deadline_is_served_first() -> None:
    engine = engine_of({"max_num_seqs": 1})
    engine.add(make_request(1, 5, 3, targets=due(1)))
    engine.schedule()
    engine.add(make_request(2, 5, 3))  # a minute
    engine.add(make_request(3, 5, 3, targets=due(9)))
    engine.add(make_request(4, 5, 3, targets=due(finish=20, first=5)))
    engine.add(make_request(5, 5, 3, targets=due(first=30)))
    engine.add(make_request(6, 5, 3, targets=due(first=61)))
    engine.run()
    assert starts(engine) == [1, 4, 3, 5, 2, 6]


def test_only_who_named_no_deadline_makes_room() -> None:
    engine = engine_of({"max_num_seqs": 2})
    engine.add(make_request(1, 20, 50))
    engine.add(make_request(2, 20, 50, targets=due(50)))
    for _ in range(5):
        engine.schedule()
        engine.deliver()
    for request_id in (3, 4):
        engine.add(make_request(request_id, 20, 50, targets=due(10)))
    engine.schedule()
    assert starts(engine) == [2, 1, 3]
    engine.run()
    assert [engine.choices[i, 0].finishes[0].num_preemptions for i in (1, 2, 3, 4)] == [1, 0, 0, 0]
    assert starts(engine)[3:] == [4, 1]
    engine.check_empty()


def test_pages_are_taken_from_the_latest_deadline() -> None:
    engine = engine_of({"num_pages": 12, "page_size": 16, "max_num_seqs": 3})
    for request_id, seconds in ((1, 30), (2, 20), (3, 10)):
        engine.add(make_request(request_id, 20, 100, targets=due(seconds)))
    engine.run()
    preemptions = [engine.choices[i, 0].finishes[0].num_preemptions for i in (1, 2, 3)]
    assert preemptions[0] > 0
    assert preemptions[2] == 0


def test_without_a_deadline_nobody_starves() -> None:
    """It is passed only by what comes within the default deadline after it."""
    engine = TimedEngine(
        ready={"max_num_seqs": 1, "max_num_batched_tokens": 256}, scheduling_policy="deadline", default_deadline=2.0
    )
    arrived = engine.now
    engine.add(make_request(1, 20, 10))
    number = 2
    while len(engine.token_times.get((1, 0), ())) < 10:
        # A flood of urgent ones, more than can be served: there is always one waiting.
        if engine.engine.scheduler.stats().num_waiting < 3:
            engine.add(make_request(number, 20, 10, targets=ServiceTargets(engine.now_ns + SECOND)))
            number += 1
        assert engine.advance()
        assert engine.now - arrived < 4
    assert engine.now - arrived > 1.0  # it was passed


@pytest.mark.parametrize(("policy", "in_time"), [("fcfs", 3), ("deadline", 5)])
def test_it_meets_deadlines_that_fcfs_misses(policy: str, in_time: int) -> None:
    """Five urgent requests behind five that have time; so few steps are known that nothing is predicted."""
    engine = TimedEngine(ready={"max_num_seqs": 1}, scheduling_policy=policy)
    began = engine.now_ns
    for request_id in range(1, 6):
        engine.add(make_request(request_id, 20, 3, targets=ServiceTargets(began + 100 * SECOND)))
    for request_id in range(11, 16):
        engine.add(make_request(request_id, 20, 3, targets=ServiceTargets(began + SECOND // 3)))
    engine.run()
    served = [key[0] for key, choice in engine.engine.choices.items() if choice.tokens]
    urgent = [i for i in served if i > 10 and engine.token_times[i, 0][-1] <= (began + SECOND // 3) * 1e-9]
    assert len(urgent) == in_time
