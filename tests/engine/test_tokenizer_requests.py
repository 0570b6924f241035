"""Requests on their way through the tokenizer process: encoded, clamped, refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from tokenizer_calls import feed, generate, ids_of, refusal, run_until_quiet
from tokenizer_world import (
    Row,
    World,
    byte_fallback_tokenizer,
    collect,
    make_world,
    ready,
    save_directory,
    settings_for,
)

from ringserve.engine.prompt_encoder import PromptEncoder
from ringserve.messages.columns import pack_i32, unpack_i32
from ringserve.messages.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from ringserve.messages.requests import RequestRefused, TokenizedRequest


def test_a_request_reaches_the_scheduler(world: World) -> None:
    generate(world, max_tokens=5, n=2)
    (request,) = world.scheduler.take()
    assert isinstance(request, TokenizedRequest)
    assert unpack_i32(request.prompt_token_ids).tolist() == ids_of(world, "Hello")
    assert (request.n, request.max_tokens, request.received_ns) == (2, 5, 10)
    assert request.sent_ns > 0
    world.actor.handle(RequestRefused(1, 503, "full"), "scheduler")
    assert world.frontend.take() == [RequestRefused(1, 503, "full")]
    assert not world.actor._requests


@pytest.mark.parametrize(
    ("num_prompt", "asked", "granted", "clamped"),
    [
        (10, None, 22, False),
        (10, 22, 22, False),
        (10, 23, 22, True),
        (31, 5, 1, True),
        (31, None, 1, False),
        (32, 0, 0, False),
        (5, 0, 0, False),
    ],
)
def test_max_tokens_is_clamped_to_what_fits(
    world: World, num_prompt: int, asked: int | None, granted: int, clamped: bool
) -> None:
    world.actor.handle(ready(max_model_len=32), "scheduler")
    world.frontend.clear()
    generate(world, TokenPrompt(pack_i32([5] * num_prompt)), max_tokens=asked)
    assert world.scheduler.take()[0].max_tokens == granted
    feed(world, Row(1, start=True, finish="length"))
    (start,) = collect(world.frontend.take())[1, 0].starts
    assert (start.max_tokens, start.max_tokens_clamped, start.num_prompt_tokens) == (granted, clamped, num_prompt)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "param"),
    [
        (TokenPrompt(pack_i32([5] * 32)), 1, "prompt"),
        (TokenPrompt(pack_i32([5] * 32)), None, "prompt"),
        (TokenPrompt(pack_i32([5] * 33)), 0, "prompt"),
        (TextPrompt("a b c " * 20), 1, "prompt"),
        (TextPrompt("x" * 10_000), 1, "prompt"),
        (ChatPrompt([{"role": "user", "content": "a b c " * 20}]), 1, "messages"),
        (ChatPrompt([{"role": "user", "content": "x" * 10_000}]), 1, "messages"),
    ],
)
def test_a_prompt_that_is_too_long_is_refused(world: World, prompt: Prompt, max_tokens: int | None, param: str) -> None:
    world.actor.handle(ready(max_model_len=32), "scheduler")
    world.frontend.clear()
    run_until_quiet(world, lambda: generate(world, prompt, max_tokens=max_tokens))
    refused = refusal(world)
    assert refused.message.startswith("This model's maximum context length is 32 tokens. However, your request has ")
    assert (refused.status, refused.param, refused.code) == (400, param, "context_length_exceeded")
    assert not world.actor._requests


def test_ten_megabytes_are_refused_without_encoding(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> list[int]:
        raise AssertionError("encoded")

    monkeypatch.setattr(PromptEncoder, "_encode_text", never)
    for prompt in (TextPrompt("word " * 2_000_000), ChatPrompt([{"role": "user", "content": "word " * 2_000_000}])):
        run_until_quiet(world, partial(generate, world, prompt))
        assert refusal(world).code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (TextPrompt(""), "empty"),
        (TokenPrompt(b""), "empty"),
        (TokenPrompt(pack_i32([1, 49_152])), "49152 is out of vocabulary"),
        (TokenPrompt(pack_i32([1, -1])), "-1 is out of vocabulary"),
        (ChatPrompt([]), "empty"),
        (ChatPrompt([{"role": "user", "content": [{"type": "image_url"}]}]), "only text"),
        (ChatPrompt([{}]), "template"),
        (ChatPrompt([{"role": "user", "content": "x"}], chat_template="{{ raise_exception('no way') }}"), "no way"),
    ],
)
def test_bad_prompts_get_400(world: World, prompt: Prompt, words: str) -> None:
    run_until_quiet(world, lambda: generate(world, prompt))
    refused = refusal(world)
    assert refused.status == 400
    assert words in refused.message


@pytest.mark.parametrize("text", ["\x00", "a\x00b\ud800c", "\ud83d\ude00", "\udfff" * 50])
def test_control_characters_and_surrogates_are_encoded(world: World, text: str) -> None:
    generate(world, TextPrompt(text), echo=True)
    generate(world, ChatPrompt([{"role": "user", "content": text}]), request_id=2)
    assert [type(message) for message in world.scheduler.take()] == [TokenizedRequest, TokenizedRequest]
    feed(world, Row(1, start=True, finish="length"), Row(2, finish="length"))
    prompt_text = collect(world.frontend.take())[1, 0].starts[0].prompt_text
    assert prompt_text == text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def test_a_fault_of_the_library_refuses_one_request(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicError(BaseException):
        pass

    def panic(*_: Any) -> list[int]:
        raise PanicError("index out of bounds")

    with monkeypatch.context() as patched:
        patched.setattr(PromptEncoder, "_encode_text", panic)
        generate(world)
    assert refusal(world).status == 500
    generate(world)
    assert len(world.scheduler.take()) == 1
    feed(world, Row(1, finish="abort"))


def test_a_request_id_used_twice_is_refused(world: World) -> None:
    generate(world)
    world.scheduler.clear()
    generate(world)
    assert refusal(world).status == 500
    assert len(world.actor._requests) == 1
    feed(world, Row(1, finish="abort"))


def test_no_chat_template_names_the_option(tmp_path: Any) -> None:
    directory = save_directory(byte_fallback_tokenizer("llama"), tmp_path, None)
    world = make_world(settings_for(directory), ready())
    generate(world, ChatPrompt([{"role": "user", "content": "Hi"}]))
    refused = refusal(world)
    assert refused.status == 400
    assert "--chat-template" in refused.message
