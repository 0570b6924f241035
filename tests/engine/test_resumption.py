"""A request that enters with tokens already generated goes on as if it had never been interrupted.

Through the real tokenizer, scheduler and executor. For each case the uninterrupted run is cut after k tokens: what the
client has by then is what had been sent, the rest must be the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from engine_core import LoadedExecutor, default_model
from engine_text import Answer, TextEngine
from tokenizers import Tokenizer

from ringserve.config import TokenizerSettings
from ringserve.engine.tokenizer_loader import load_tokenizer
from ringserve.messages.columns import pack_f32, pack_i32
from ringserve.messages.prompts import TextPrompt
from ringserve.messages.requests import GenerateRequest, OutputParams, ResumedChoice
from ringserve.messages.sampling import SamplingParams

PROMPT = "The seven wonders of the ancient world are"
MAX_TOKENS = 14


@pytest.fixture(scope="module")
def engine() -> Iterator[TextEngine]:
    executor = LoadedExecutor(default_model(), "float32", threads=1, max_model_len=512)
    yield TextEngine(executor, default_model())
    executor.actor.shutdown()


def tokenizer() -> Tokenizer:
    return load_tokenizer(TokenizerSettings(default_model(), None, None)).backend


def emoji_bias() -> dict[str, bytes]:
    """A bias that makes the model write emoji: characters of several tokens."""
    pieces = [tokenizer().encode(character, add_special_tokens=False).ids for character in "🦜🐙🧭🪶𝄞"]
    ids = sorted({token_id for piece in pieces if len(piece) > 2 for token_id in piece})
    return {"logit_bias_ids": pack_i32(ids), "logit_bias_values": pack_f32([60.0] * len(ids))}


def request(sampling: SamplingParams, output: OutputParams, **more: Any) -> GenerateRequest:
    return GenerateRequest(1, TextPrompt(PROMPT), sampling, output, max_tokens=MAX_TOKENS, **more)


def cut(whole: Answer, tokens: int) -> ResumedChoice:
    """What a journal holds once the output with the first ``tokens`` tokens has been sent."""
    sent = ""
    ids: list[int] = []
    for text, step_ids in zip(whole.texts, whole.token_ids_by_step, strict=True):
        if len(ids) + len(step_ids) > tokens:
            break
        sent += text
        ids += step_ids
    assert len(ids) == tokens
    return ResumedChoice(0, pack_i32(ids), len(sent))


GREEDY = SamplingParams(seed=0, temperature=0.0)
SEEDED = SamplingParams(seed=77, temperature=1.1, top_p=0.9)

CASES: dict[str, tuple[dict[str, Any], OutputParams]] = {
    "plain": ({}, OutputParams()),
    "penalties": (
        {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4},
        OutputParams(),
    ),
    "min_tokens": ({"min_tokens": 10}, OutputParams()),
    "logprobs": ({"logprobs": 3}, OutputParams()),
    "multi_byte": ({"ignore_eos": True}, OutputParams()),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("base", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_the_rest_equals_the_uninterrupted_run(engine: TextEngine, base: SamplingParams, case: str) -> None:
    changes, output = CASES[case]
    if case == "multi_byte":
        changes = {**changes, **emoji_bias()}
    sampling = msgspec.structs.replace(base, **changes)
    whole = engine.run(request(sampling, output))[1, 0]
    assert whole.finish is not None
    total = len(whole.token_ids)
    if case == "multi_byte":
        assert any(not text for text in whole.texts[:-1]), "no character was split: the case shows nothing"
        assert whole.text == tokenizer().decode(whole.token_ids)
    for tokens in sorted({0, 1, *range(2, total - 1, 3), total - 1}):
        resumed = cut(whole, tokens)
        rest = engine.run(request(sampling, output, resumed=(resumed,)))[1, 0]
        assert list(resumed.token_ids) + list(pack_i32(rest.token_ids)) == list(pack_i32(whole.token_ids))
        assert rest.text == whole.text[resumed.characters_sent :]
        assert rest.finish is not None
        assert (rest.finish.reason, rest.finish.num_output_tokens) == (whole.finish.reason, total)
        if sampling.logprobs >= 0:
            assert_same_logprobs(rest, whole)


def assert_same_logprobs(rest: Answer, whole: Answer) -> None:
    """Of the new tokens, as in the uninterrupted run."""
    expected = whole.logprobs[len(whole.logprobs) - len(rest.logprobs) :]
    assert len(rest.logprobs) == len(rest.token_ids)
    assert [entry.token_id for entry in rest.logprobs] == [entry.token_id for entry in expected]
    for got, want in zip(rest.logprobs, expected, strict=True):
        assert got.logprob == pytest.approx(want.logprob, abs=1e-3)
        assert [top.token_id for top in got.top] == [top.token_id for top in want.top]


@pytest.mark.parametrize("base", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_stop_string_across_the_cut_is_found(engine: TextEngine, base: SamplingParams) -> None:
    free = engine.run(request(base, OutputParams()))[1, 0]
    text = "".join(free.texts[:-2])
    stop = text[len(free.texts[0]) + 1 : len(text) - 1]  # spans nearly all tokens
    assert len(stop) > 10
    output = OutputParams(stop=(stop,))
    whole = engine.run(request(base, output))[1, 0]
    assert whole.finish is not None
    assert whole.finish.stop_reason == stop
    assert whole.text == text[: text.index(stop)]
    for tokens in range(len(whole.token_ids)):
        resumed = cut(whole, tokens)
        rest = engine.run(request(base, output, resumed=(resumed,)))[1, 0]
        assert rest.text == whole.text[resumed.characters_sent :]
        assert rest.finish is not None
        assert rest.finish.stop_reason == stop
        assert rest.finish.num_output_tokens == whole.finish.num_output_tokens


def test_choices_resume_each_from_its_own_place(engine: TextEngine) -> None:
    sampling = msgspec.structs.replace(SEEDED, ignore_eos=True)
    whole = engine.run(request(sampling, OutputParams(), n=3))
    resumed = (
        cut(whole[1, 0], 3),
        msgspec.structs.replace(cut(whole[1, 1], MAX_TOKENS), choice=1, finish_reason="length"),
    )
    rest = engine.run(request(sampling, OutputParams(), n=3, resumed=resumed))
    assert set(rest) == {(1, 0), (1, 2)}
    assert rest[1, 0].token_ids == whole[1, 0].token_ids[3:]
    assert rest[1, 2].token_ids == whole[1, 2].token_ids
    assert rest[1, 0].text == whole[1, 0].text[resumed[0].characters_sent :]
