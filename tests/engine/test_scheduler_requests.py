"""How a request enters the scheduler: refused, with several choices, or resumed."""

from __future__ import annotations

import pytest
from scheduler_inputs import executor_ready, make_request
from scheduler_simulation import Engine
from simulated_tokens import run_alone

from ringserve.messages.columns import pack_i32
from ringserve.messages.requests import ResumedChoice


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
