"""Tokens on their way back through the tokenizer process: text, stop strings, ends."""

from __future__ import annotations

import pytest
from tokenizer_calls import feed, generate, ids_of
from tokenizer_world import Row, World, collect, ready

from ringserve.messages.columns import pack_i32, unpack_i32
from ringserve.messages.prompts import ChatPrompt, TokenPrompt
from ringserve.messages.requests import Abort, TokenizedRequest


def test_a_stream(world: World) -> None:
    prompt = ChatPrompt([{"role": "user", "content": "Hi"}])
    generate(world, prompt, echo=True)
    ids = ids_of(world, "naïve 👩‍👩‍👧 中文測試 text")
    for index, token in enumerate(ids):
        feed(world, Row(1, [token], start=index == 0))
    feed(world, Row(1, [2], finish="stop"))
    messages = world.frontend.take()
    received = collect(messages)[1, 0]
    assert received.text == "naïve 👩‍👩‍👧 中文測試 text"
    assert not any("�" in delta for delta in received.deltas)
    assert received.token_ids == [*ids, 2]
    (start,), (finish,) = received.starts, received.finishes
    assert start.prompt_text.startswith("<|im_start|>system")
    assert unpack_i32(start.prompt_token_ids).tolist() == ids_of(world, start.prompt_text)
    assert (start.received_ns, start.queued_ns, start.first_scheduled_ns, start.num_cached_tokens) == (10, 20, 30, 3)
    assert start.tokenized_ns > 0
    assert (finish.reason, finish.stop_reason, finish.num_output_tokens) == ("stop", None, len(ids) + 1)
    assert finish.num_preemptions == 2
    assert all(message.tokens_sent_ns == 40 and message.sent_ns >= message.received_ns > 0 for message in messages)
    assert not world.actor._requests


def test_echo_of_token_ids_is_decoded(world: World) -> None:
    generate(world, TokenPrompt(pack_i32(ids_of(world, "Hello 😀"))), echo=True)
    feed(world, Row(1, start=True, finish="length"))
    assert collect(world.frontend.take())[1, 0].starts[0].prompt_text == "Hello 😀"


@pytest.mark.parametrize(
    ("finish", "stop_token_id", "include", "skip", "text"),
    [
        ("stop", None, False, True, "Hello"),
        ("stop", None, False, False, "Hello<|im_end|>"),
        ("stop", "last", False, True, "Hello"),
        ("stop", "last", True, True, "Hello world"),
        ("length", None, False, True, "Hello world"),
    ],
)
def test_the_last_tokens_text(
    world: World, finish: str, stop_token_id: str | None, include: bool, skip: bool, text: str
) -> None:
    last = ids_of(world, " world")[0] if stop_token_id or finish == "length" else 2
    generate(world, include=include, skip_special=skip)
    feed(world, Row(1, [*ids_of(world, "Hello"), last], finish=finish, stop_token_id=last if stop_token_id else None))
    received = collect(world.frontend.take())[1, 0]
    assert received.text == text
    assert received.finishes[0].stop_reason == (last if stop_token_id else None)
    assert received.finishes[0].num_output_tokens == len(received.token_ids) == 2


def test_eos_that_is_no_special_token_is_not_shown(world: World) -> None:
    (eos,) = ids_of(world, " world")
    world.actor.handle(ready(eos=[eos]), "scheduler")
    world.frontend.clear()
    generate(world)
    feed(world, Row(1, [*ids_of(world, "Hello"), eos], finish="stop"))
    assert collect(world.frontend.take())[1, 0].text == "Hello"


def test_incomplete_characters_are_flushed_at_the_end(world: World) -> None:
    ids = ids_of(world, "𒐫")
    assert len(ids) > 2
    generate(world)
    for token in ids[:-1]:
        feed(world, Row(1, [token]))
    feed(world, Row(1, finish="length"))
    received = collect(world.frontend.take())[1, 0]
    assert received.text == world.actor._encoder.decode(ids[:-1], True)
    assert "�" in received.text


def test_an_error_passes_its_message(world: World) -> None:
    generate(world)
    feed(world, Row(1, finish="error", message="no finite logit"))
    (finish,) = collect(world.frontend.take())[1, 0].finishes
    assert (finish.reason, finish.message) == ("error", "no finite logit")


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_a_stop_string_over_several_tokens(world: World, include: bool, together: bool) -> None:
    ids = ids_of(world, "Hello wonderful world, how are you")
    generate(world, stop=("ful wor", "zzz"), include=include, n=2)
    world.scheduler.clear()
    if together:
        feed(world, Row(1, ids), Row(1, ids[:1], choice=1))
    else:
        feed(world, Row(1, ids[:1]), Row(1, ids[:1], choice=1))
        for token in ids[1:]:
            feed(world, Row(1, [token]))
    assert world.scheduler.take() == [Abort(1, 0, "stop")]
    feed(world, Row(1, [5], finish="stop"))  # the scheduler's own last word comes too late
    feed(world, Row(1, ids[1:2], choice=1, finish="length"))
    seen = collect(world.frontend.take())
    received = seen[1, 0]
    assert received.text == ("Hello wonderful wor" if include else "Hello wonder")
    (finish,) = received.finishes
    assert (finish.reason, finish.stop_reason, finish.num_output_tokens) == ("stop", "ful wor", 3)
    assert received.token_ids == ids[:3]
    assert seen[1, 1].text == "Hello wonderful"
    assert not world.actor._requests
    assert not world.scheduler


def test_stop_string_and_scheduler_at_once_is_one_final_and_no_abort(world: World) -> None:
    generate(world, stop=("world",))
    world.scheduler.clear()
    feed(world, Row(1, ids_of(world, "Hello world"), finish="length"))
    (finish,) = collect(world.frontend.take())[1, 0].finishes
    assert (finish.reason, finish.stop_reason) == ("stop", "world")
    assert not world.scheduler


def test_min_tokens_delays_stop_strings(world: World) -> None:
    ids = ids_of(world, "a b a b a b")
    generate(world, stop=("a",), min_tokens=3)
    for token in ids:
        feed(world, Row(1, [token]))
    received = collect(world.frontend.take())[1, 0]
    assert (received.text, received.finishes[0].num_output_tokens) == ("a b a b ", 5)
    assert isinstance(world.scheduler.take()[-1], Abort)


def test_held_text_is_let_out_at_the_end(world: World) -> None:
    generate(world, stop=("Hello!",))
    feed(world, Row(1, ids_of(world, "Hello")))
    assert collect(world.frontend)[1, 0].text == ""
    feed(world, Row(1, [2], finish="stop"))
    assert collect(world.frontend.take())[1, 0].text == "Hello"


def test_rows_of_unknown_requests_are_dropped(world: World) -> None:
    generate(world)
    feed(world, Row(77, [5, 6], start=True, finish="stop"), Row(1, [2], finish="stop"), Row(1, [5], choice=9))
    seen = collect(world.frontend.take())
    assert set(seen) == {(1, 0)}
    assert seen[1, 0].token_ids == [2]
    world.actor.handle(Abort(1), "frontend-0")
    assert [type(message) for message in world.scheduler.take()] == [TokenizedRequest]
