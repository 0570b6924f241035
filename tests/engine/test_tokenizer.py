"""The tokenizer process's actor between in-memory neighbours: news, order, its own routes."""

from __future__ import annotations

import asyncio
import struct

import pytest
from tokenizer_calls import GREETING, LONG, SECOND, feed, generate, ids_of, refusal, run_until_quiet
from tokenizer_world import STATS, TIMES, Row, World, collect, default_gguf, make_world, ready, settings_for

from ringserve.messages.columns import pack_i32, unpack_i32
from ringserve.messages.integrity import CheckIntegrity, IntegrityReport
from ringserve.messages.prompts import ChatPrompt, TextPrompt
from ringserve.messages.requests import Abort, TokenizedRequest
from ringserve.messages.startup import LoadProgress, Started
from ringserve.messages.text_outputs import TextOutputs
from ringserve.messages.tokenization import DetokenizeRequest, DetokenizeResult, TokenizeRequest, TokenizeResult


def test_start_is_reported_and_requests_before_the_model_are_refused() -> None:
    world = make_world(settings_for(default_gguf()))
    assert [type(report) for report in world.reports] == [Started]
    generate(world)
    refused = refusal(world)
    assert (refused.status, refused.request_id) == (503, 1)
    assert refused.retry_after is not None


def test_news_of_the_engine_goes_to_all_frontends(world: World) -> None:
    for message in (LoadProgress("load", 0.5), ready()):
        world.actor.handle(message, "scheduler")
        assert world.frontend.take() == [message]
        assert world.second_frontend.take() == [message]
    report = IntegrityReport(SECOND + 5, (), 1, 1, 0, 0, 4)
    world.actor.handle(report, "scheduler")
    assert world.second_frontend.take() == [report]
    assert not world.frontend


def test_stats_for_nobody_go_to_all_frontends(world: World) -> None:
    feed(world)
    for box in (world.frontend, world.second_frontend):
        (message,) = box.take()
        assert (message.stats, message.times, message.texts) == (STATS, TIMES, ())


def test_the_loop_turns_while_a_long_prompt_is_encoded(world: World) -> None:
    world.actor.handle(ready(max_model_len=300_000), "scheduler")
    flushes = len(world.flushes)
    turns = run_until_quiet(world, lambda: generate(world, TextPrompt(LONG * 30)))
    assert turns > 20
    assert len(world.flushes) == flushes + 1
    assert len(unpack_i32(world.scheduler.take()[0].prompt_token_ids)) > 100_000
    feed(world, Row(1, finish="abort"))


def test_order_is_kept_within_a_frontend_only(world: World) -> None:
    def act() -> None:
        generate(world, TextPrompt(LONG), 1)
        generate(world, GREETING, 2)
        world.actor.handle(Abort(2, 0), "frontend-0")
        world.actor.handle(CheckIntegrity(9), "frontend-0")
        world.actor.handle(TokenizeRequest(10, GREETING), "frontend-0")
        assert not world.scheduler
        generate(world, GREETING, SECOND)
        assert [message.request_id for message in world.scheduler.take()] == [SECOND]

    run_until_quiet(world, act)
    seen = world.scheduler.take()
    assert [type(message) for message in seen] == [TokenizedRequest, TokenizedRequest, Abort, CheckIntegrity]
    assert [message.request_id for message in seen] == [1, 2, 2, 9]
    assert seen[3].tokenizer_requests == 3
    assert [type(message) for message in world.frontend.take()] == [TokenizeResult]
    feed(world, Row(1, finish="abort"), Row(2, finish="abort"), Row(SECOND, finish="abort"))
    assert {1, 2} == {key[0] for key in collect(world.frontend.take())}
    assert {SECOND} == {key[0] for key in collect(world.second_frontend.take())}


def test_a_request_aborted_before_its_encoding_never_reaches_the_scheduler(world: World) -> None:
    def act() -> None:
        generate(world, TextPrompt(LONG), 1)  # in the thread already
        generate(world, GREETING, 2, n=2)
        generate(world, GREETING, 3)
        world.actor.handle(Abort(1), "frontend-0")
        world.actor.handle(Abort(2), "frontend-0")
        world.actor.handle(Abort(2), "frontend-0")

    run_until_quiet(world, act)
    assert [message.request_id for message in world.scheduler.take()] == [3]
    seen = collect(world.frontend.take())
    assert set(seen) == {(1, 0), (2, 0), (2, 1)}
    assert {received.finishes[0].reason for received in seen.values()} == {"abort"}
    world.actor.handle(Abort(3), "frontend-0")
    assert world.scheduler.take() == [Abort(3)]
    feed(world, Row(3, finish="abort"))


def test_a_fault_in_a_completion_ends_the_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(settings_for(default_gguf()), ready())
    monkeypatch.setattr(world.actor, "_on_admitted", lambda *_: 1 / 0)

    async def live() -> None:
        generate(world, TextPrompt(LONG))
        await world.actor.run()

    with pytest.raises(ZeroDivisionError):
        asyncio.run(live())


def test_run_ends_when_it_is_told_to() -> None:
    world = make_world(settings_for(default_gguf()), ready())

    async def live() -> None:
        life = asyncio.ensure_future(world.actor.run())
        generate(world, TextPrompt(LONG))
        await asyncio.sleep(0)
        world.actor.request_stop()
        await life

    asyncio.run(live())


def test_tokenize_and_detokenize(world: World) -> None:
    handle = world.actor.handle
    handle(TokenizeRequest(1, TextPrompt("Hello world"), with_strings=True), "frontend-0")
    handle(DetokenizeRequest(2, pack_i32([1, *ids_of(world, "Hello 😀")])), "frontend-0")
    handle(DetokenizeRequest(3, b""), "frontend-0")
    handle(DetokenizeRequest(4, pack_i32([-1])), "frontend-0")
    handle(DetokenizeRequest(5, struct.pack("i", 2**31 - 1)), "frontend-0")
    handle(TokenizeRequest(6, ChatPrompt([{"role": "user", "content": "Hi"}])), "frontend-0")
    tokenized, text, empty, negative, large, chat = world.frontend.take()
    assert tokenized == TokenizeResult(1, pack_i32(ids_of(world, "Hello world")), ("Hello", "Ġworld"))
    assert text == DetokenizeResult(2, "<|im_start|>Hello 😀")
    assert empty == DetokenizeResult(3, "")
    assert (negative.status, negative.param, large.status) == (400, "tokens", 400)
    assert unpack_i32(chat.token_ids)[0] == 1
    assert chat.token_strings is None


def test_large_ones_go_through_the_thread(world: World) -> None:
    ids = ids_of(world, LONG)

    def act() -> None:
        world.actor.handle(TokenizeRequest(1, TextPrompt(LONG)), "frontend-0")
        world.actor.handle(DetokenizeRequest(2, pack_i32(ids)), "frontend-0")
        assert not world.frontend

    run_until_quiet(world, act)
    assert world.frontend.take() == [TokenizeResult(1, pack_i32(ids), None), DetokenizeResult(2, LONG)]


def test_one_message_for_each_frontend(world: World) -> None:
    generate(world)
    generate(world, request_id=2)
    generate(world, request_id=SECOND + 1)
    feed(world, Row(1, [5]), Row(SECOND + 1, [6]), Row(2, [7]))
    assert [type(message) for message in world.frontend] == [TextOutputs]
    assert {key: received.token_ids for key, received in collect(world.frontend).items()} == {(1, 0): [5], (2, 0): [7]}
    assert {key: r.token_ids for key, r in collect(world.second_frontend).items()} == {(SECOND + 1, 0): [6]}
    feed(world, Row(1, finish="abort"), Row(2, finish="abort"), Row(SECOND + 1, finish="abort"))
