"""The scheduler's steps: what is in one, how many run ahead, and the books behind them."""

from __future__ import annotations

import pytest
from scheduler_inputs import executor_ready, first_stop, make_request
from scheduler_simulation import Engine
from simulated_tokens import EOS

from ringserve.messages.columns import unpack_i32
from ringserve.messages.steps import ModelRunnerOutput, SchedulerOutput


def rows(step: SchedulerOutput | None) -> dict[int, int]:
    """Tokens by slot."""
    assert step is not None
    return dict(zip(unpack_i32(step.slots), unpack_i32(step.num_tokens), strict=True))


@pytest.mark.parametrize("page_size", [16, 64])
def test_a_prompt_is_computed_in_chunks_of_the_budget(page_size: int) -> None:
    engine = Engine(executor_ready(page_size, num_pages=8, max_num_batched_tokens=32))
    request = make_request(1, 100, 3)
    engine.add(request)
    sizes: list[int] = []
    while (step := engine.schedule()) is not None:
        sizes += rows(step).values()
        engine.deliver()
    assert sizes == [32, 32, 32, 4, 1, 1]
    engine.check_alone(request)
    engine.check_empty()


@pytest.mark.parametrize("page_size", [16, 64])
def test_decodes_come_first_and_the_rest_of_the_budget_goes_to_prompts(page_size: int) -> None:
    engine = Engine(executor_ready(page_size, max_num_batched_tokens=16))
    engine.add(make_request(1, 4, 20))
    engine.add(make_request(2, 4, 20))
    assert rows(engine.schedule()) == {0: 4, 1: 4}
    engine.deliver()
    engine.add(make_request(3, 40, 20))
    engine.add(make_request(4, 2, 20))
    assert rows(engine.schedule()) == {0: 1, 1: 1, 2: 14}
    assert rows(engine.schedule()) == {0: 1, 1: 1, 2: 14}
    engine.deliver()
    step = engine.schedule()
    assert rows(step) == {0: 1, 1: 1, 2: 12, 3: 2}
    assert step is not None
    assert [new.slot for new in step.new_sequences] == [3]


def test_the_older_prompt_gets_the_budget_first() -> None:
    engine = Engine(executor_ready(max_num_batched_tokens=16))
    engine.add(make_request(1, 40, 20))
    engine.add(make_request(2, 4, 20))
    assert rows(engine.schedule()) == {0: 16}
    assert rows(engine.schedule()) == {0: 16}
    engine.deliver()
    assert rows(engine.schedule()) == {0: 8, 1: 4}


def test_no_more_sequences_than_slots() -> None:
    engine = Engine(executor_ready(max_num_seqs=2))
    requests = [make_request(i, 5, 4) for i in range(5)]
    for request in requests:
        engine.add(request)
    assert len(rows(engine.schedule())) == 2
    assert engine.scheduler.stats().num_waiting == 3
    engine.run()
    for request in requests:
        engine.check_alone(request)
    engine.check_empty()


def test_a_step_carries_only_what_changed() -> None:
    engine = Engine(executor_ready(page_size=16))
    engine.add(make_request(1, 14, 40))
    first, second, third = engine.schedule(), engine.schedule(), None
    engine.deliver()
    third, _ = engine.schedule(), engine.deliver()
    fourth = engine.schedule()
    assert first is not None
    assert second is not None
    assert third is not None
    assert fourth is not None
    assert len(first.new_sequences) == 1
    assert unpack_i32(first.new_pages).tolist() == [1]
    assert [len(step.new_sequences) for step in (second, third, fourth)] == [0, 0, 0]
    assert [unpack_i32(step.new_pages).tolist() for step in (second, third, fourth)] == [[], [], [2]]


def test_two_steps_are_in_flight_and_no_more() -> None:
    engine = Engine(executor_ready())
    engine.add(make_request(1, 5, 10))
    assert rows(engine.schedule()) == {0: 5}
    assert rows(engine.schedule()) == {0: 1}
    assert engine.schedule() is None
    engine.deliver()
    assert rows(engine.schedule()) == {0: 1}


def test_one_step_in_flight_if_so_wished() -> None:
    engine = Engine(executor_ready(), max_steps_in_flight=1)
    engine.add(make_request(1, 5, 10))
    engine.schedule()
    assert engine.schedule() is None


@pytest.mark.parametrize(("max_tokens", "max_model_len"), [(3, 512), (100, 8)])
def test_known_lengths_are_never_passed(max_tokens: int, max_model_len: int) -> None:
    engine = Engine(executor_ready(max_model_len=max_model_len))
    request = make_request(1, 5, max_tokens)
    engine.add(request)
    engine.run()
    assert engine.executor.next_step_id == 3
    assert engine.choices[1, 0].end[1:] == ("length", None)
    assert len(engine.choices[1, 0].tokens) == 3
    engine.check_alone(request)


def test_an_end_by_eos_costs_one_thrown_away_token() -> None:
    engine = Engine(executor_ready())
    request = make_request(1, 5, 400, ignore_eos=False)
    engine.add(request)
    engine.run()
    assert engine.executor.next_step_id == first_stop(1, 5) + 1
    engine.check_alone(request)
    assert engine.choices[1, 0].tokens[-1] in EOS


def test_a_late_row_is_not_credited_to_the_slots_new_owner() -> None:
    engine = Engine(executor_ready(max_num_seqs=1))
    first, second = make_request(1, 5, 400, ignore_eos=False), make_request(2, 3, 6)
    engine.add(first)
    engine.add(second)
    for _ in range(first_stop(1, 5)):
        while engine.schedule() is not None:
            pass
        engine.deliver()
    assert engine.choices[1, 0].finishes
    step = engine.schedule()  # the slot's late row is still in flight
    assert step is not None
    assert unpack_i32(step.freed_slots).tolist() == [0] == [new.slot for new in step.new_sequences]
    engine.deliver()
    assert (2, 0) not in engine.choices
    engine.run()
    engine.check_alone(first)
    engine.check_alone(second)


def test_results_must_come_in_order() -> None:
    engine = Engine(executor_ready())
    engine.add(make_request(1, 5, 10))
    engine.schedule()
    wrong = ModelRunnerOutput(7, b"", b"", None, (), 0, 0, 0)
    with pytest.raises(ValueError, match="answered step 7; the oldest in flight is 0"):
        engine.scheduler.update_from_output(wrong, 0)


def test_times_and_counters_of_a_step() -> None:
    engine = Engine(executor_ready())
    engine.add(make_request(1, 5, 10))
    engine.add(make_request(2, 7, 10))
    engine.schedule()
    result = engine.scheduler.update_from_output(engine.in_flight.popleft(), 5000)
    assert result.request_ids == {1, 2}
    times = result.times
    assert (times.step_id, times.num_tokens, times.num_sequences, times.result_received_ns) == (0, 12, 2, 5000)
    assert (times.executor_received_ns, times.executor_started_ns, times.executor_finished_ns) == (1, 2, 3)
    assert times.scheduled_ns == engine.steps[0].sent_ns == 1003
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_steps, stats.num_computed_tokens) == (2, 0, 1, 12)
    assert stats.num_free_pages == stats.num_pages - 2


def test_integrity_sees_tampering() -> None:
    engine = Engine(executor_ready())
    engine.add(make_request(1, 20, 30))
    engine.add(make_request(2, 20, 30))
    engine.schedule()
    scheduler = engine.scheduler
    sequence = next(iter(scheduler._running))
    page = sequence.block_table.pop()
    assert any(f"page {page} has 1 references and is held 0 times" in p for p in scheduler.check_integrity())
    sequence.block_table.append(page)
    sequence.num_pending_tokens = 0
    assert any("in flight are 1" in p for p in scheduler.check_integrity())
    sequence.num_pending_tokens = 1
    sequence.slot, slot = 1, sequence.slot
    assert any("slots are lost or shared" in p for p in scheduler.check_integrity())
    sequence.slot = slot
    sequence.arrival = 9
    assert any("lost its place" in p for p in scheduler.check_integrity())
    sequence.arrival = 0
    assert scheduler.check_integrity() == []
