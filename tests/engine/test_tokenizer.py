"""The tokenizer process's actor between in-memory neighbours."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
from tokenizer_world import (
    CHAT_TEMPLATE,
    STATS,
    TIMES,
    Row,
    World,
    byte_fallback_tokenizer,
    collect,
    default_gguf,
    make_world,
    ready,
    save_directory,
    settings_for,
    token_outputs,
)

from ringserve.engine import token_questions
from ringserve.engine.prompt_encoder import PIECE, PromptEncoder, PromptError, PromptLimits
from ringserve.messages import (
    Abort,
    ChatPrompt,
    CheckIntegrity,
    DetokenizeRequest,
    DetokenizeResult,
    FinishReason,
    GenerateRequest,
    IntegrityReport,
    LoadProgress,
    LogprobColumns,
    OutputParams,
    Prompt,
    PromptLogprobs,
    RequestRefused,
    ResumedChoice,
    SamplingParams,
    Started,
    TextOutputs,
    TextPrompt,
    TokenizedRequest,
    TokenizeRequest,
    TokenizeResult,
    TokenPrompt,
    pack_f32,
    pack_i32,
    unpack_i32,
)
from ringserve.shm import MAX_MESSAGE

SECOND = 1 << 48
"""Request ids of the second frontend begin here."""
GREETING = TextPrompt("Hello")


@pytest.fixture(scope="module")
def shared_world() -> World:
    return make_world(settings_for(default_gguf()), ready())


@pytest.fixture
def world(shared_world: World) -> World:
    """The default model's tokenizer with 8,192 tokens of context and nothing open."""
    assert not shared_world.actor._requests
    shared_world.actor.handle(ready(), "scheduler")
    for role in ("frontend-0", "frontend-1", "scheduler"):
        shared_world[role].clear()
    return shared_world


def generate(
    world: World,
    prompt: Prompt = GREETING,
    request_id: int = 1,
    *,
    stop: tuple[str, ...] = (),
    include: bool = False,
    skip_special: bool = True,
    echo: bool = False,
    min_tokens: int = 0,
    logprobs: int = -1,
    prompt_logprobs: int = -1,
    n: int = 1,
    max_tokens: int | None = 100,
    resumed: tuple[ResumedChoice, ...] = (),
) -> None:
    world.actor.handle(
        GenerateRequest(
            request_id,
            prompt,
            SamplingParams(1, min_tokens=min_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs),
            OutputParams(stop, include, skip_special, echo),
            n,
            max_tokens,
            resumed=resumed,
            received_ns=10,
        ),
        f"frontend-{request_id >> 48}",
    )


def ids_of(world: World, text: str) -> list[int]:
    return world.actor._encoder._encode_text(text, False)


def feed(world: World, *rows: Row, **columns: Any) -> None:
    world.actor.handle(token_outputs(rows, **columns), "scheduler")


def refusal(world: World) -> RequestRefused:
    (message,) = world.frontend.take()
    assert isinstance(message, RequestRefused)
    assert not world.scheduler
    return message


# ------------------------------------------------------------------------------------------------------ start


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


# -------------------------------------------------------------------------------------------------- encoding


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


# --------------------------------------------------------------------------------------------------- ordering


def run_until_quiet(world: World, act: Callable[[], None]) -> int:
    """Call ``act`` on a loop and run it until nothing waits for a thread; the number of loop turns that took."""

    async def live() -> int:
        act()
        turns = 0
        while world.actor._lanes._lanes or world.actor._question_lanes._lanes:
            turns += 1
            await asyncio.sleep(0)
        return turns

    return asyncio.run(live())


LONG = "the quick brown fox jumps over the lazy dog. " * 700


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


# ------------------------------------------------------------------------------------------------ text upwards


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


# -------------------------------------------------------------------------------------------------- logprobs


def columns(*entries: list[int]) -> LogprobColumns:
    """One entry for each token: the candidates' ids; the i-th candidate's value is -i - 0.5, ranks are 1, 2, ..."""
    flat = [token for entry in entries for token in entry]
    values = [-index - 0.5 for entry in entries for index in range(len(entry))]
    chosen = [entry for entry in entries if entry]
    return LogprobColumns(
        pack_i32(map(len, entries)), pack_i32(flat), pack_f32(values), pack_i32(range(1, len(chosen) + 1))
    )


def test_logprobs_have_strings_and_exact_bytes(world: World) -> None:
    ids = ids_of(world, "𒐫")
    generate(world, logprobs=1)
    generate(world, request_id=2)
    feed(
        world,
        Row(77, [5]),
        Row(2, [6]),
        Row(1, ids),
        logprobs=columns([5, 9], [], *([token, 2] for token in ids)),
    )
    feed(world, Row(1, [2], finish="stop"), Row(2, finish="abort"), logprobs=columns([2]))
    seen = collect(world.frontend.take())
    assert not seen[2, 0].logprobs
    tokens = seen[1, 0].logprobs
    assert [token.token_id for token in tokens] == [*ids, 2]
    assert b"".join(token.raw for token in tokens[:-1]) == "𒐫".encode()
    assert (tokens[0].token, tokens[0].logprob, tokens[0].rank) == ("�", -0.5, 2)
    assert (tokens[0].top[0].token, tokens[0].top[0].raw, tokens[0].top[0].logprob) == (
        "<|im_end|>",
        b"<|im_end|>",
        -1.5,
    )
    assert (tokens[-1].token, tokens[-1].top) == ("<|im_end|>", ())


def test_logprobs_never_come_before_their_text(world: World) -> None:
    generate(world, logprobs=0, stop=("lo wor",))
    ids = ids_of(world, "Hello we")
    feed(world, Row(1, ids[:1]), logprobs=columns(ids[:1]))
    assert not collect(world.frontend.take())[1, 0].logprobs
    feed(world, Row(1, ids[1:]), logprobs=columns(*([token] for token in ids[1:])))
    assert [token.token_id for token in collect(world.frontend.take())[1, 0].logprobs] == ids
    feed(world, Row(1, finish="abort"))


def test_prompt_logprobs_come_whole_with_the_first_choice(world: World) -> None:
    ids = ids_of(world, "one two three four")
    generate(world, TokenPrompt(pack_i32(ids)), echo=True, prompt_logprobs=1, n=2)
    feed(world, prompt_logprobs=(PromptLogprobs(1, 0, columns([], [ids[1], 7])),))
    feed(
        world,
        Row(1, [5], start=True),
        Row(1, [5], choice=1, start=True),
        prompt_logprobs=(PromptLogprobs(1, 2, columns([ids[2], 7], [ids[3], 7])),),
    )
    feed(world, Row(1, finish="length"), Row(1, choice=1, finish="length"))
    seen = collect(world.frontend.take())
    assert seen[1, 1].starts[0].prompt_logprobs is None
    tokens = seen[1, 0].starts[0].prompt_logprobs
    assert [token.token_id for token in tokens] == ids
    assert [token.logprob for token in tokens] == [None, -0.5, -0.5, -0.5]
    assert "".join(token.token for token in tokens) == "one two three four"


# -------------------------------------------------------------------------------------------------- resumption

STORY = "naïve 👩‍👩‍👧 text 𒐫 with STO and S in it, then STOP here"


@pytest.mark.parametrize("kind", ["default", "llama", "unigram"])
@pytest.mark.parametrize("include", [False, True])
def test_resumed_anywhere_no_character_is_sent_twice(kind: str, include: bool, tmp_path: Any, world: World) -> None:
    if kind != "default":
        directory = save_directory(byte_fallback_tokenizer(kind), tmp_path, CHAT_TEMPLATE)
        world = make_world(settings_for(directory), ready())
    ids = ids_of(world, STORY)

    def run(k: int, sent: str) -> tuple[list[str], Any]:
        """Deltas after each token from the k-th on, and the final row."""
        resumed = (ResumedChoice(0, pack_i32(ids[:k]), len(sent)),) if k else ()
        run_until_quiet(world, lambda: generate(world, stop=("STOP",), include=include, resumed=resumed))
        deltas = []
        for token in ids[k:]:
            feed(world, Row(1, [token]))
            received = collect(world.frontend.take()).get((1, 0))
            if received is None:
                break
            deltas.append(received.text)
            if received.finishes:
                world.scheduler.clear()
                return deltas, received.finishes[0]
        raise AssertionError("no final row")

    whole, finish = run(0, "")
    cut = "STOP" if include else ""
    assert "".join(whole) == world.actor._encoder.decode(ids, True).split("STOP")[0] + cut
    for k in range(1, len(whole)):
        sent = "".join(whole[:k])
        deltas, resumed_finish = run(k, sent)
        assert sent + "".join(deltas) == "".join(whole)
        assert resumed_finish == finish


def test_a_client_that_has_less_gets_the_rest(world: World) -> None:
    ids = ids_of(world, "Hello wonderful world")
    run_until_quiet(world, lambda: generate(world, resumed=(ResumedChoice(0, pack_i32(ids), 7),)))
    (request,) = world.scheduler.take()
    assert request.resumed[0].finish_reason is None
    feed(world, Row(1, [2], finish="stop"))
    received = collect(world.frontend.take())[1, 0]
    assert received.text == "onderful world"
    assert received.finishes[0].num_output_tokens == len(ids) + 1


def test_resumed_tokens_that_complete_a_stop_end_the_choice(world: World) -> None:
    ids = ids_of(world, "Hello wonderful world")
    resumed = (ResumedChoice(0, pack_i32(ids), 3), ResumedChoice(1, pack_i32(ids[:1]), 5))
    over: FinishReason = "length"
    done = ResumedChoice(2, pack_i32(ids), 9, over)
    run_until_quiet(world, lambda: generate(world, stop=("ful",), n=3, resumed=(*resumed, done)))
    (request,) = world.scheduler.take()
    assert [entry.finish_reason for entry in request.resumed] == ["stop", None, "length"]
    seen = collect(world.frontend.take())
    assert set(seen) == {(1, 0)}
    assert seen[1, 0].text == "lo wonder"
    assert (seen[1, 0].finishes[0].stop_reason, seen[1, 0].finishes[0].num_output_tokens) == ("ful", 2)
    feed(world, Row(1, choice=1, finish="length"), Row(1, choice=2, finish="length"))
    assert set(collect(world.frontend.take())) == {(1, 1)}
    run_until_quiet(world, lambda: generate(world, stop=("ful",), resumed=resumed[:1]))
    assert not world.scheduler
    assert not world.actor._requests


# ----------------------------------------------------------------------------------------------------- routes


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
    plain, spaced = ids_of(world, "Paris"), ids_of(world, " Paris")
    assert words_of(world) == []
    found = words_of(world, " Paris", "?!")
    assert plain in found
    assert (spaced in found) == (len(spaced) == len(plain))
    assert ids_of(world, "?!") in found


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
