"""Pages run out: who gives them back, and that nothing is lost by it."""

from __future__ import annotations

import pytest
from scheduler_inputs import executor_ready, make_request
from scheduler_simulation import Engine
from simulated_tokens import run_alone


def outgrow(engine: Engine) -> None:
    """Run until the first preemption; tokens of the victim are in flight then."""
    while engine.scheduler.stats().num_preemptions == 0:
        if engine.schedule() is None:
            assert engine.deliver(), "the pool was large enough"


@pytest.mark.parametrize("page_size", [16, 64])
def test_preemption_takes_the_latest_and_loses_no_token(page_size: int) -> None:
    engine = Engine(executor_ready(page_size, num_pages=7, max_num_batched_tokens=256))
    requests = [make_request(i, page_size - 2, 3 * page_size) for i in (1, 2, 3)]
    for request in requests:
        engine.add(request)
    engine.run()
    stats = engine.scheduler.stats()
    assert stats.num_preemptions > 0
    assert stats.preempted_tokens > 0
    assert engine.choices[1, 0].finishes[0].num_preemptions == 0
    assert engine.choices[3, 0].finishes[0].num_preemptions > 0
    assert sum(choice.finishes[0].num_preemptions for choice in engine.choices.values()) == stats.num_preemptions
    for request in requests:
        engine.check_alone(request)
    engine.check_empty()


@pytest.mark.parametrize("page_size", [16, 64])
def test_a_victim_keeps_its_place(page_size: int) -> None:
    """It is admitted again before whoever came later, even one that would fit at once."""
    engine = Engine(executor_ready(page_size, num_pages=6, max_num_batched_tokens=256))
    older, victim = (make_request(i, 2 * page_size - 2, 2 * page_size + 8) for i in (1, 2))
    later = make_request(3, 1, 40)
    engine.add(older)
    engine.add(victim)
    outgrow(engine)
    assert not engine.choices[1, 0].finishes
    engine.add(later)
    num_steps = len(engine.steps)
    engine.run()
    admitted = [new.sampling.seed for step in engine.steps[num_steps:] for new in step.new_sequences]
    assert admitted[:2] == [2, 3]
    for request in (older, victim, later):
        engine.check_alone(request)


@pytest.mark.parametrize("max_steps_in_flight", [2, 3])
def test_a_victim_is_not_sent_again_before_its_tokens_are_back(max_steps_in_flight: int) -> None:
    engine = Engine(executor_ready(page_size=16, num_pages=6, max_num_batched_tokens=256), max_steps_in_flight)
    engine.add(make_request(1, 30, 40))
    engine.add(make_request(2, 31, 40))
    outgrow(engine)
    num_known = len(engine.choices[2, 0].tokens)
    (victim,) = engine.scheduler._waiting
    num_pending = victim.num_pending_tokens
    assert num_pending == max_steps_in_flight - 1
    engine.abort(1)  # room enough to go on at once
    for _ in range(num_pending):
        assert engine.schedule() is None
        engine.deliver()
    sent = engine.schedule()
    assert sent is not None
    (again,) = sent.new_sequences
    assert len(again.token_ids) // 4 - 31 == len(engine.choices[2, 0].tokens) == num_known + num_pending
    engine.run()
    engine.check_alone(make_request(2, 31, 40))


def test_a_victim_may_end_while_it_waits() -> None:
    engine = Engine(executor_ready(page_size=16, num_pages=6, max_num_batched_tokens=256))
    engine.add(make_request(1, 30, 40))
    probe = make_request(2, 31, 400)
    engine.add(probe)
    outgrow(engine)
    num_known = len(engine.choices[2, 0].tokens)
    stop = run_alone(probe, 0, 512)[0][num_known]

    engine = Engine(executor_ready(page_size=16, num_pages=6, max_num_batched_tokens=256))
    engine.add(make_request(1, 30, 40))
    request = make_request(2, 31, 400, stop_token_ids=(stop,))
    engine.add(request)
    outgrow(engine)
    assert not engine.choices[2, 0].finishes
    engine.deliver()
    assert engine.choices[2, 0].finishes[0].reason == "stop"
    engine.run()
    engine.check_alone(request)
    engine.check_empty()


def test_a_head_that_does_not_fit_lets_no_later_one_pass() -> None:
    engine = Engine(executor_ready(page_size=16, num_pages=8, max_num_batched_tokens=256))
    engine.add(make_request(1, 60, 20))
    engine.schedule()
    engine.add(make_request(2, 100, 4))
    engine.add(make_request(3, 2, 4))
    while not engine.choices.get((1, 0)) or not engine.choices[1, 0].finishes:
        step = engine.schedule()
        assert step is None or not step.new_sequences
        if step is None:
            engine.deliver()
    step = engine.schedule()
    assert step is not None
    assert len(step.new_sequences[0].token_ids) == 400


def test_no_thrash_at_a_full_pool() -> None:
    """What is computed again stays a fraction of what is computed."""
    engine = Engine(executor_ready(page_size=16, num_pages=20, max_num_seqs=16, max_num_batched_tokens=64))
    requests = [make_request(i, 20, 100) for i in range(16)]
    for request in requests:
        engine.add(request)
    engine.run()
    for request in requests:
        engine.check_alone(request)
    stats = engine.scheduler.stats()
    assert stats.num_preemptions > 0
    assert stats.preempted_tokens < 16 * 120 / 2


@pytest.mark.parametrize("page_size", [16, 64])
def test_one_sequence_that_fills_the_pool_gets_to_its_end(page_size: int) -> None:
    engine = Engine(executor_ready(page_size, num_pages=3))
    first, second = make_request(1, 1, 3 * page_size - 1), make_request(2, 1, 3 * page_size - 1)
    engine.add(first)
    engine.add(second)
    engine.run()
    engine.check_alone(first)
    engine.check_alone(second)
    engine.check_empty()


def test_abort_while_preempted() -> None:
    engine = Engine(executor_ready(page_size=16, num_pages=6, max_num_batched_tokens=256))
    engine.add(make_request(1, 30, 40))
    engine.add(make_request(2, 31, 40))
    outgrow(engine)
    engine.abort(2)
    assert engine.choices[2, 0].finishes[0].num_preemptions == 1
    engine.run()
    engine.check_alone(make_request(1, 30, 40))
    engine.check_empty()
