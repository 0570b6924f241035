"""The tokenizer process's actor between in-memory neighbours: news, order, its own routes."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import msgspec
import pytest
from tokenizer_calls import GREETING, LONG, SECOND, feed, generate, ids_of, refusal, run_until_quiet
from tokenizer_world import STATS, TIMES, Row, World, collect, default_gguf, make_world, ready, settings_for

from ringserve.engine import token_questions
from ringserve.engine.prompt_encoder import PIECE, PromptError, PromptLimits
from ringserve.messages.columns import pack_i32, unpack_i32
from ringserve.messages.integrity import CheckIntegrity, IntegrityReport
from ringserve.messages.prompts import ChatPrompt, TextPrompt
from ringserve.messages.requests import Abort, GenerateRequest, OutputParams, TokenizedRequest
from ringserve.messages.sampling import SamplingParams
from ringserve.messages.startup import LoadProgress, Started
from ringserve.messages.text_outputs import TextOutputs
from ringserve.messages.tokenization import DetokenizeRequest, DetokenizeResult, TokenizeRequest, TokenizeResult
from ringserve.shm import MAX_MESSAGE


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


def words_of(world: World, *words: str, **more: Any) -> Any:
    """What the tokenizer process makes of a request with bad words."""
    sampling = SamplingParams(1, **more)
    request = GenerateRequest(1, GREETING, sampling, OutputParams(bad_words=words), max_tokens=5)
    run_until_quiet(world, lambda: world.actor.handle(request, "frontend-0"))
    if refused := world.frontend.take():
        return refused[0]
    (request,) = world.scheduler.take()
    feed(world, Row(1, finish="abort"))
    world.frontend.clear()
    found, start = [], 0
    for length in unpack_i32(request.sampling.bad_word_lengths):
        found.append(unpack_i32(request.sampling.bad_word_ids)[start : start + length].tolist())
        start += length
    return found


def test_bad_words_become_tokens_with_and_without_a_space(world: World) -> None:
    assert words_of(world) == []
    lengths = set()
    for word in ("Paris", " Paris", "Nile", "unfortunately", "two words", "?!", "\u4e16\u754c", "x\n"):
        forms = [ids_of(world, word.lstrip()), ids_of(world, " " + word.lstrip())]
        found = words_of(world, "is", word)
        assert [sequence for sequence in forms if sequence not in found] == []
        lengths.add(len(forms[0]) - len(forms[1]))
    assert len(lengths) > 1  # as many tokens, and others


def test_bad_words_that_leave_nothing_are_refused(world: World) -> None:
    (token,) = ids_of(world, "Paris")[-1:]
    for more in (
        {"allowed_token_ids": pack_i32([token])},
        {"allowed_token_ids": pack_i32([2, token]), "min_tokens": 1},  # 2 is the model's end
        {"allowed_token_ids": pack_i32([7, token]), "min_tokens": 1, "stop_token_ids": pack_i32([7])},
    ):
        refused = words_of(world, "Paris", **more)
        assert (refused.status, refused.param) == (400, "bad_words")
    assert words_of(world, "Paris", allowed_token_ids=pack_i32([2, token]))
    assert words_of(world, "Paris", allowed_token_ids=pack_i32([2, token]), min_tokens=1, ignore_eos=True)
    with pytest.raises(PromptError, match="out of vocabulary") as caught:
        world.actor._encoder.bad_word_ids(["Paris"], PromptLimits(100, 8192))
    assert caught.value.param == "bad_words"


def test_nobody_waits_for_a_long_question(world: World) -> None:
    """Prompts, short questions and aborts of the same frontend pass a text that takes long, and long prompts have
    threads of their own."""

    def act() -> None:
        world.actor.handle(TokenizeRequest(1, TextPrompt(LONG * 30)), "frontend-0")
        world.actor.handle(DetokenizeRequest(2, pack_i32([5] * 100_000)), "frontend-0")
        generate(world, GREETING, 3)
        world.actor.handle(TokenizeRequest(4, GREETING), "frontend-0")
        world.actor.handle(DetokenizeRequest(5, pack_i32([5])), "frontend-0")
        world.actor.handle(CheckIntegrity(6), "frontend-0")
        assert [message.request_id for message in world.scheduler.take()] == [3, 6]
        assert [message.request_id for message in world.frontend.take()] == [4, 5]
        generate(world, TextPrompt(LONG), 7)

    run_until_quiet(world, act)
    assert [message.request_id for message in world.scheduler.take()] == [7]
    assert [message.request_id for message in world.frontend.take()] == [1, 2]
    feed(world, Row(3, finish="abort"), Row(7, finish="abort"))


def test_questions_that_nobody_waits_for_are_dropped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    worked: list[int] = []
    tokenize = world.actor._questions.tokenize

    def counted(request: TokenizeRequest) -> TokenizeResult:
        worked.append(request.request_id)
        return tokenize(request)

    monkeypatch.setattr(world.actor._questions, "tokenize", counted)

    def act() -> None:
        for request_id in (1, 2, 3):
            world.actor.handle(TokenizeRequest(request_id, TextPrompt(LONG)), "frontend-0")
        world.actor.handle(Abort(1), "frontend-0")  # in the thread already
        world.actor.handle(Abort(2), "frontend-0")

    run_until_quiet(world, act)
    assert [message.request_id for message in world.frontend.take()] == [3]
    assert worked == [1, 3]
    assert not world.actor._asked
    assert not world.scheduler.take()


def test_questions_with_too_large_answers_are_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not go into a message would end the process, and with it the server."""
    monkeypatch.setattr(token_questions, "MAX_TOKENS", 30_000)
    monkeypatch.setattr(token_questions, "MAX_STRINGS", 20)
    monkeypatch.setattr(token_questions, "MAX_TEXT_BYTES", 50_000)

    def act() -> None:
        world.actor.handle(TokenizeRequest(1, TextPrompt("1" * 30_001)), "frontend-0")
        world.actor.handle(TokenizeRequest(2, TextPrompt("1" * 30_000)), "frontend-0")
        world.actor.handle(TokenizeRequest(3, TextPrompt("1" * 21), with_strings=True), "frontend-0")
        world.actor.handle(DetokenizeRequest(4, pack_i32([5] * 30_001)), "frontend-0")
        assert [message.request_id for message in world.frontend] == [3, 4]  # these are told at once
        world.actor.handle(DetokenizeRequest(5, pack_i32(ids_of(world, " Washington") * 20_000)), "frontend-0")

    run_until_quiet(world, act)
    answers = {message.request_id: message for message in world.frontend.take()}
    assert len(unpack_i32(answers.pop(2).token_ids)) == 30_000
    assert {key: (each.status, each.param) for key, each in answers.items()} == {
        1: (400, "prompt"),
        3: (400, "return_token_strs"),
        4: (400, "tokens"),
        5: (400, "tokens"),
    }
    assert "has 30001 tokens, more than the 30000" in answers[1].message


def test_the_largest_answers_go_into_a_message() -> None:
    """Several of them may wait for a frontend."""
    ids = msgspec.msgpack.encode(TokenizeResult(2**63, bytes(4 * token_questions.MAX_TOKENS), None))
    text = msgspec.msgpack.encode(DetokenizeResult(2**63, "a" * token_questions.MAX_TEXT_BYTES))
    assert 3 * max(len(ids), len(text)) < MAX_MESSAGE


@pytest.mark.parametrize("count", [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE])
@pytest.mark.parametrize("bad", [-1, 49_152])
def test_ids_are_looked_at_to_the_last(world: World, count: int, bad: int) -> None:
    def act() -> None:
        world.actor.handle(DetokenizeRequest(1, pack_i32([*[5] * count, bad])), "frontend-0")
        world.actor.handle(DetokenizeRequest(2, pack_i32([5] * count)), "frontend-0")

    run_until_quiet(world, act)
    refused, text = sorted(world.frontend.take(), key=lambda message: message.request_id)
    assert (refused.status, refused.param) == (400, "tokens")
    assert f"Token id {bad} is out" in refused.message
    assert text == DetokenizeResult(2, world.actor._encoder.decode([5] * count, skip_special_tokens=False))


def test_one_message_for_each_frontend(world: World) -> None:
    generate(world)
    generate(world, request_id=2)
    generate(world, request_id=SECOND + 1)
    feed(world, Row(1, [5]), Row(SECOND + 1, [6]), Row(2, [7]))
    assert [type(message) for message in world.frontend] == [TextOutputs]
    assert {key: received.token_ids for key, received in collect(world.frontend).items()} == {(1, 0): [5], (2, 0): [7]}
    assert {key: r.token_ids for key, r in collect(world.second_frontend).items()} == {(SECOND + 1, 0): [6]}
    feed(world, Row(1, finish="abort"), Row(2, finish="abort"), Row(SECOND + 1, finish="abort"))
