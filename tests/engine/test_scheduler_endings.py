"""How a choice ends: end of sequence, stop tokens, lengths, faults, aborts."""

from __future__ import annotations

import pytest
from scheduler_inputs import executor_ready, first_stop, make_request
from scheduler_simulation import Engine
from simulated_tokens import EOS, run_alone

from ringserve.messages.columns import pack_i32
from ringserve.messages.steps import ModelRunnerOutput


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
