"""The scheduler's rules, one by one."""

from __future__ import annotations

import pytest
from scheduler_inputs import executor_ready, make_request
from scheduler_simulation import Engine
from simulated_tokens import EOS, position_logprob, run_alone

from ringserve.messages import (
    LogprobColumns,
    ModelRunnerOutput,
    ResumedChoice,
    SchedulerOutput,
    pack_i32,
    unpack_f32,
    unpack_i32,
)


def rows(step: SchedulerOutput | None) -> dict[int, int]:
    """Tokens by slot."""
    assert step is not None
    return dict(zip(unpack_i32(step.slots), unpack_i32(step.num_tokens), strict=True))


def first_stop(request_id: int, num_prompt_tokens: int, token_ids: tuple[int, ...] = EOS) -> int:
    """Number of tokens that the request generates up to and including the first of these."""
    tokens, _, _ = run_alone(make_request(request_id, num_prompt_tokens, 400), 0, 512)
    return next(i for i, token in enumerate(tokens) if token in token_ids) + 1


# ------------------------------------------------------------------------------------------ steps and budget


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


# --------------------------------------------------------------------------------------------- steps ahead


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


# ------------------------------------------------------------------------------------------------ endings


def test_eos_is_ignored_where_asked() -> None:
    engine = Engine(executor_ready())
    request = make_request(1, 5, first_stop(1, 5) + 3, ignore_eos=True)
    engine.add(request)
    engine.run()
    assert engine.choices[1, 0].finishes[0].reason == "length"
    engine.check_alone(request)


def test_a_stop_token_is_named() -> None:
    engine = Engine(executor_ready())
    request = make_request(1, 5, 400, stop_token_ids=(3, 7))
    engine.add(request)
    engine.run()
    tokens, reason, stop = engine.choices[1, 0].end
    assert reason == "stop"
    assert stop == tokens[-1]
    assert stop in (3, 7)
    engine.check_alone(request)


def test_eos_that_is_also_a_stop_token_is_eos() -> None:
    engine = Engine(executor_ready())
    engine.add(make_request(1, 5, 400, ignore_eos=False, stop_token_ids=EOS))
    engine.add(make_request(2, 5, 400, ignore_eos=True, stop_token_ids=EOS))
    engine.run()
    assert engine.choices[1, 0].finishes[0].stop_token_id is None
    assert engine.choices[2, 0].finishes[0].stop_token_id in EOS


def test_nothing_stops_before_min_tokens() -> None:
    """Even if a sampler let an eos through."""
    engine = Engine(executor_ready(), max_steps_in_flight=1)
    engine.add(make_request(1, 5, 4, ignore_eos=False, stop_token_ids=(3,), min_tokens=2))
    for token in (1, 3, 2):
        assert not engine.choices.get((1, 0)) or not engine.choices[1, 0].finishes
        step = engine.schedule()
        assert step is not None
        engine.in_flight.clear()
        engine.in_flight.append(ModelRunnerOutput(step.step_id, pack_i32([0]), pack_i32([token]), None, (), 0, 0, 0))
        engine.deliver()
    assert engine.choices[1, 0].end == ([1, 3, 2], "stop", None)


def test_max_tokens_zero_computes_the_prompt_only() -> None:
    engine = Engine(executor_ready(max_num_batched_tokens=16))
    engine.add(make_request(1, 40, 0, prompt_logprobs=0))
    engine.run()
    assert engine.choices[1, 0].end == ([], "length", None)
    assert len(engine.choices[1, 0].starts) == 1
    assert [chunk.start for chunk in engine.prompt_logprobs] == [0, 17, 33]
    assert engine.executor.computed_tokens == 40
    engine.check_empty()


def test_a_failed_sequence_ends_alone() -> None:
    engine = Engine(executor_ready())
    broken, sound = make_request(1, 5, 10, n=2), make_request(2, 5, 10)
    engine.executor.fail_at[1, 1] = 4
    engine.add(broken)
    engine.add(sound)
    engine.run()
    finish = engine.choices[1, 1].finishes[0]
    assert (finish.reason, finish.message) == ("error", "no finite logit")
    assert engine.choices[1, 1].tokens == run_alone(broken, 1, 512)[0][:4]
    assert engine.choices[1, 0].end == run_alone(broken, 0, 512)
    engine.check_alone(sound)
    engine.check_empty()


def test_a_missing_token_is_an_error() -> None:
    engine = Engine(executor_ready())
    engine.add(make_request(1, 5, 10))
    engine.schedule()
    engine.in_flight[0] = ModelRunnerOutput(0, b"", b"", None, (), 0, 0, 0)
    engine.deliver()
    assert engine.choices[1, 0].finishes[0].reason == "error"
    assert "no token" in engine.choices[1, 0].finishes[0].message


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("page_size", [16, 64])
def test_what_can_never_fit_is_refused_with_the_numbers(page_size: int) -> None:
    engine = Engine(executor_ready(page_size, num_pages=2, max_model_len=1000))
    capacity = 2 * page_size
    refused = engine.add(make_request(1, capacity, 5))
    assert refused is not None
    assert (refused.request_id, refused.status, refused.type) == (1, 400, "invalid_request_error")
    assert f"This model's maximum context length is {capacity} tokens. However, " in refused.message
    assert f"your prompt has {capacity} tokens" in refused.message
    fits = make_request(2, capacity - 1, 50)
    assert engine.add(fits) is None
    engine.run()
    engine.check_alone(fits)
    engine.check_empty()


def test_max_model_len_refuses_too() -> None:
    engine = Engine(executor_ready(max_model_len=32))
    refused = engine.add(make_request(1, 32, 5))
    assert refused is not None
    assert "maximum context length is 32 tokens" in refused.message
    assert not engine.scheduler.has_work


@pytest.mark.parametrize(("n", "max_tokens"), [(0, 5), (1, -1)])
def test_numbers_that_make_no_sense_are_refused(n: int, max_tokens: int) -> None:
    """Silence would leave the client waiting for ever."""
    refused = Engine(executor_ready()).add(make_request(1, 5, max_tokens, n=n))
    assert refused is not None
    assert refused.status == 400


def test_an_empty_prompt_and_a_doubled_id_are_refused() -> None:
    engine = Engine(executor_ready())
    empty = engine.add(make_request(1, 0, 5))
    assert empty is not None
    assert empty.status == 400
    engine.add(make_request(2, 3, 5))
    doubled = engine.add(make_request(2, 3, 5))
    assert doubled is not None
    assert doubled.status == 500
    engine.run()
    engine.check_alone(make_request(2, 3, 5))


# ----------------------------------------------------------------------------------------- pages, preemption


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


def outgrow(engine: Engine) -> None:
    """Run until the first preemption; tokens of the victim are in flight then."""
    while engine.scheduler.stats().num_preemptions == 0:
        if engine.schedule() is None:
            assert engine.deliver(), "the pool was large enough"


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


# ------------------------------------------------------------------------------------------ choices, resumed


def test_choices_are_independent() -> None:
    engine = Engine(executor_ready())
    request = make_request(1, 20, 30, n=4, ignore_eos=False)
    engine.add(request)
    engine.schedule()
    engine.abort(1, choice=2, reason="stop")
    engine.run()
    assert len({tuple(engine.choices[1, choice].tokens) for choice in range(4)}) == 4
    for choice in (0, 1, 3):
        assert engine.choices[1, choice].end == run_alone(request, choice, 512)
    assert engine.choices[1, 2].end == ([], "stop", None)


@pytest.mark.parametrize("sent", [0, 1, 10, 19])
def test_a_resumed_choice_goes_on_where_it_was(sent: int) -> None:
    request = make_request(1, 20, 20)
    tokens, _, _ = run_alone(request, 0, 512)
    engine = Engine(executor_ready())
    engine.add(make_request(1, 20, 20, resumed=(ResumedChoice(0, pack_i32(tokens[:sent]), 0),)))
    engine.run()
    assert engine.choices[1, 0].end == (tokens[sent:], "length", None)
    assert engine.steps[0].new_sequences[0].num_prompt_tokens == 20


def test_resumed_choices_that_are_over() -> None:
    engine = Engine(executor_ready())
    resumed = (
        ResumedChoice(0, pack_i32([9, 9]), 0, "stop"),  # the client knows
        ResumedChoice(1, pack_i32([9] * 8), 0),  # all its tokens
        ResumedChoice(2, pack_i32([9, 1]), 0),  # its eos
    )
    engine.add(make_request(1, 20, 8, n=4, ignore_eos=False, resumed=resumed))
    assert (1, 0) not in engine.choices
    assert engine.choices[1, 1].end == ([], "length", None)
    assert engine.choices[1, 2].end == ([], "stop", None)
    engine.run()
    assert engine.choices[1, 3].end == run_alone(make_request(1, 20, 8, ignore_eos=False), 3, 512)
    assert len(engine.steps[0].new_sequences) == 1
    engine.check_empty()


def test_a_request_that_is_over_altogether_leaves_nothing() -> None:
    engine = Engine(executor_ready())
    engine.add(make_request(1, 20, 8, resumed=(ResumedChoice(0, pack_i32([9]), 0, "length"),)))
    assert not engine.scheduler.has_work
    assert not engine.scheduler.has_request(1)
    assert engine.choices == {}
    assert engine.schedule() is None


# -------------------------------------------------------------------------------------------------- abort


@pytest.mark.parametrize("reason", ["abort", "stop"])
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_abort_at_any_stage(reason: str, steps: int) -> None:
    """Waiting, in flight once, in flight twice, in the middle."""
    engine = Engine(executor_ready(max_num_batched_tokens=16))
    other = make_request(2, 9, 12)
    engine.add(make_request(1, 10, 50, n=2))
    engine.add(other)
    for _ in range(steps):
        if engine.schedule() is None:
            engine.deliver()
            engine.schedule()
    engine.abort(1, reason=reason)
    engine.abort(1, reason=reason)
    for choice in (0, 1):
        assert [finish.reason for finish in engine.choices[1, choice].finishes] == [reason]
        assert len(engine.choices[1, choice].starts) == 1
    assert not engine.scheduler.has_request(1)
    engine.run()
    engine.check_alone(other)
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


def test_abort_of_the_unknown_and_the_finished_is_nothing() -> None:
    engine = Engine(executor_ready())
    engine.abort(77)
    engine.add(make_request(1, 5, 2))
    engine.run()
    engine.abort(1)
    engine.abort(1, choice=0)
    assert len(engine.choices[1, 0].finishes) == 1


def test_an_aborted_request_frees_its_pages_for_the_next_step() -> None:
    engine = Engine(executor_ready(page_size=16, num_pages=4, max_num_seqs=1))
    engine.add(make_request(1, 50, 10))
    engine.schedule()
    engine.schedule()
    engine.abort(1)
    assert engine.scheduler.stats().num_free_pages == 4
    other = make_request(2, 50, 10)
    engine.add(other)
    engine.run()
    engine.check_alone(other)


# ----------------------------------------------------------------------------------------------- logprobs


def test_logprobs_follow_their_tokens() -> None:
    engine = Engine(executor_ready())
    without, with_two = make_request(1, 6, 9), make_request(2, 5, 9, logprobs=2)
    engine.add(without)
    engine.add(with_two)
    engine.run()
    assert engine.choices[1, 0].logprobs == [None] * 9
    history = list(unpack_i32(with_two.prompt_token_ids))
    for token, entry in zip(engine.choices[2, 0].tokens, engine.choices[2, 0].logprobs, strict=True):
        history.append(token)
        assert entry == (token, position_logprob(history), len(history))


@pytest.mark.parametrize("page_size", [16, 64])
def test_prompt_logprobs_of_choice_zero_once_each_even_after_preemption(page_size: int) -> None:
    engine = Engine(executor_ready(page_size, num_pages=7, max_num_batched_tokens=12))
    requests = [make_request(i, page_size - 2, 3 * page_size, n=2, prompt_logprobs=0) for i in (1, 2)]
    for request in requests:
        engine.add(request)
    engine.run()
    assert engine.choices[1, 1].finishes[0].num_preemptions + engine.choices[2, 0].finishes[0].num_preemptions > 0
    sent = [new for step in engine.steps for new in step.new_sequences]
    assert {new.sampling.prompt_logprobs for new in sent if new.choice == 1} == {-1}
    assert len(sent) > 4
    assert sent[0].sampling.prompt_logprobs == 0
    assert sent[-1].sampling.prompt_logprobs == -1  # sent again with all of them known
    for request in requests:
        prompt = list(unpack_i32(request.prompt_token_ids))
        position = 0
        for chunk in engine.prompt_logprobs:
            if chunk.request_id != request.request_id:
                continue
            assert chunk.start == position
            assert unpack_i32(chunk.columns.counts).tolist() == [
                int(p > 0) for p in range(position, position + len(chunk.columns.counts) // 4)
            ]
            for value in unpack_f32(chunk.columns.values):
                position += position == 0
                assert value == position_logprob(prompt[: position + 1])
                position += 1
        assert position == len(prompt)


def test_prompt_logprobs_that_are_known_are_cut_off() -> None:
    """A recompute with other chunks repeats a part of what was handed on."""
    engine = Engine(executor_ready(max_num_batched_tokens=8), max_steps_in_flight=1)
    engine.add(make_request(1, 20, 5, prompt_logprobs=0))
    for first, count in ((0, 4), (2, 5), (0, 6), (7, 1)):
        step = engine.schedule()
        assert step is not None
        result = engine.in_flight[0]
        columns = LogprobColumns(
            pack_i32([1] * count), pack_i32(range(first, first + count)), bytes(4 * count), pack_i32([1] * count)
        )
        chunk = type(result.prompt_logprobs[0])(0, first, columns) if result.prompt_logprobs else None
        engine.in_flight[0] = ModelRunnerOutput(
            result.step_id, result.slots, result.token_ids, None, (chunk,) if chunk else (), 0, 0, 0
        )
        engine.deliver()
    seen = [(chunk.start, unpack_i32(chunk.columns.token_ids).tolist()) for chunk in engine.prompt_logprobs]
    assert seen == [(0, [0, 1, 2, 3]), (4, [4, 5, 6])]


# ------------------------------------------------------------------------------------------------ integrity


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
