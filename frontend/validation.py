"""Ranges: from a typed body to the parameters that travel, every default filled in.

What can only be known with the tokens (does the prompt fit, is it empty) is the tokenizer process's to say.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ringserve.frontend.errors import ApiError, invalid, shortened
from ringserve.frontend.protocol import ChatCompletionBody, CompletionBody, GenerationBody, StreamOptions
from ringserve.messages.columns import pack_f32, pack_i32, unpack_i32
from ringserve.messages.prompts import Prompt, TextPrompt, TokenPrompt
from ringserve.messages.requests import OutputParams
from ringserve.messages.sampling import SamplingParams
from ringserve.messages.startup import ExecutorReady

MAX_STOP_STRINGS = 4
MAX_STOP_CHARACTERS = 4096
"""What all streams wait for while it is prepared and searched for must be bounded."""
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 256
"""Every one of a request's is looked for at each of its tokens."""
MAX_SALT_CHARACTERS = 256
MAX_TENANT_CHARACTERS = 256
_I32_MAX = 2**31 - 1
_SEED_MIN, _SEED_MAX = -(2**63), 2**64 - 1

N = TypeVar("N", int, float)


@dataclass(frozen=True)
class Limits:
    """What the server was told (configuration) and found out (``ExecutorReady``)."""

    model_name: str
    ready: ExecutorReady
    max_logprobs: int
    max_n: int
    max_choices: int
    """Choices that fit into the server at all."""


def number(value: N | None, default: N, name: str, allowed: Callable[[N], bool], range_text: str) -> N:
    """``value`` if it is in its range, ``default`` if it was not given."""
    if value is None:
        return default
    if not allowed(value):
        raise invalid(f"{name} must be {range_text}, got {value}.", name)
    return value


def check_model(model: str | None, served: str) -> None:
    if model is not None and model != served:
        raise model_not_found(model)


def model_not_found(model: str) -> ApiError:
    message = f"The model `{shortened(model)}` does not exist."
    return ApiError(404, message, param="model", code="model_not_found")


def sampling_params(
    body: GenerationBody, limits: Limits, *, logprobs: int, prompt_logprobs: int, max_tokens: int | None
) -> SamplingParams:
    """The sampling of a request; ``seed`` is drawn here where none was given."""
    defaults = limits.ready.defaults
    ids, values = _logit_bias(body.logit_bias, limits.ready.vocab_size)
    stop_token_ids = token_ids(body.stop_token_ids or [], limits.ready.vocab_size, "stop_token_ids")
    min_tokens = _min_tokens(body.min_tokens, max_tokens)
    allowed = _allowed_token_ids(body.allowed_token_ids, limits.ready)
    if min_tokens:
        _check_something_may_be_drawn(stop_token_ids, bool(body.ignore_eos), allowed, limits.ready)
    top_k = number(body.top_k, defaults.top_k, "top_k", lambda k: k >= -1, "-1, 0 (both: off) or at least 1")
    return SamplingParams(
        seed=_seed(body.seed),
        temperature=number(
            body.temperature, defaults.temperature, "temperature", lambda t: 0 <= t <= 2, "between 0 and 2"
        ),
        top_k=min(max(top_k, 0), _I32_MAX),
        top_p=number(body.top_p, defaults.top_p, "top_p", lambda p: 0 < p <= 1, "in (0, 1]"),
        min_p=number(body.min_p, defaults.min_p, "min_p", lambda p: 0 <= p <= 1, "between 0 and 1"),
        repetition_penalty=number(
            body.repetition_penalty,
            defaults.repetition_penalty,
            "repetition_penalty",
            lambda r: 0 < r <= 1000,
            "greater than 0 (at most 1000)",
        ),
        presence_penalty=number(
            body.presence_penalty, 0.0, "presence_penalty", lambda p: -2 <= p <= 2, "between -2 and 2"
        ),
        frequency_penalty=number(
            body.frequency_penalty, 0.0, "frequency_penalty", lambda p: -2 <= p <= 2, "between -2 and 2"
        ),
        logit_bias_ids=ids,
        logit_bias_values=values,
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        allowed_token_ids=allowed,
    )


def output_params(body: GenerationBody, limits: Limits, *, echo: bool) -> OutputParams:
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stop) > MAX_STOP_STRINGS:
        raise invalid(f"stop must have at most {MAX_STOP_STRINGS} strings, got {len(stop)}.", "stop")
    if any(not text for text in stop):
        raise invalid("stop must not contain an empty string.", "stop")
    if any(len(text) > MAX_STOP_CHARACTERS for text in stop):
        raise invalid(f"stop must have strings of at most {MAX_STOP_CHARACTERS} characters.", "stop")
    return OutputParams(
        stop=tuple(stop),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        echo=echo or bool(body.return_token_ids),
        bad_words=_bad_words(body.bad_words or [], limits.ready),
    )


def choices(body: GenerationBody, limits: Limits, num_prompts: int = 1) -> int:
    """``n``, such that all choices together fit into the server."""
    n = number(body.n, 1, "n", lambda n: 1 <= n <= limits.max_n, f"between 1 and {limits.max_n}")
    if n * num_prompts > limits.max_choices:
        param = "n" if n > 1 else "prompt"
        raise invalid(
            f"This server answers at most {limits.max_choices} choices at a time, got {n * num_prompts}.", param
        )
    return n


def priority(body: GenerationBody) -> int:
    return number(body.priority, 0, "priority", lambda p: abs(p) <= _I32_MAX, "a 32-bit integer")


def cache_salt(body: GenerationBody) -> str:
    """Empty: keys and values are shared with everybody who gave none either."""
    salt = body.cache_salt
    if salt is None:
        return ""
    if not 1 <= len(salt) <= MAX_SALT_CHARACTERS:
        raise invalid(f"cache_salt must have 1 to {MAX_SALT_CHARACTERS} characters, got {len(salt)}.", "cache_salt")
    return salt


def bounded_name(name: str) -> str:
    """A name, or a digest of one that is too long to be kept for long: two that differ stay two."""
    if len(name) <= MAX_TENANT_CHARACTERS:
        return name
    return "sha256:" + hashlib.sha256(name.encode()).hexdigest()


def tenant(body: GenerationBody, known: str | None) -> str:
    """On whose account it runs: what is ``known`` from outside the body, else ``user``."""
    return bounded_name(known if known is not None else body.user or "")


def stream_options(body: GenerationBody) -> StreamOptions:
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options is only allowed when stream is true.", "stream_options")
    return body.stream_options or StreamOptions()


def chat_max_tokens(body: ChatCompletionBody) -> int | None:
    """None: what fits."""
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    value = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if value is None:
        return None
    return min(number(value, 0, name, lambda v: v >= 1, "at least 1"), _I32_MAX)


def completion_max_tokens(body: CompletionBody) -> int:
    return min(number(body.max_tokens, 16, "max_tokens", lambda v: v >= 0, "at least 0"), _I32_MAX)


def chat_logprobs(body: ChatCompletionBody, limits: Limits) -> int:
    """-1: none; 0: of the chosen tokens; k: and of the k most likely ones."""
    if body.top_logprobs is not None and body.top_logprobs != 0 and not body.logprobs:
        raise invalid("top_logprobs is only allowed when logprobs is true.", "top_logprobs")
    top = bounded_logprobs(body.top_logprobs, "top_logprobs", limits)
    return max(top, 0) if body.logprobs else -1


def completion_logprobs(body: CompletionBody, limits: Limits) -> int:
    return bounded_logprobs(body.logprobs, "logprobs", limits)


def num_prompts(body: CompletionBody) -> int:
    """How many prompts there are; to be bounded before anything is done with each of them."""
    return 1 if not body.prompt or isinstance(body.prompt, str) or type(body.prompt[0]) is int else len(body.prompt)


def completion_prompts(body: CompletionBody, ready: ExecutorReady) -> list[Prompt]:
    """One prompt for each element; a flat list of token ids is one prompt.

    Ids that cannot fit are refused by their number, before millions of them are looked at one by one.
    """
    vocab_size = ready.vocab_size
    add_special_tokens = body.add_special_tokens is not False
    prompt = body.prompt
    if isinstance(prompt, str):
        return [TextPrompt(prompt, add_special_tokens)]
    if not prompt:
        raise invalid("prompt must not be empty.", "prompt")
    if type(prompt[0]) is int:
        check_length(prompt, ready.max_model_len)
    if all(type(each) is int for each in prompt):
        return [TokenPrompt(token_ids(prompt, vocab_size, "prompt"))]
    if all(type(each) is str for each in prompt):
        return [TextPrompt(str(each), add_special_tokens) for each in prompt]
    prompts: list[Prompt] = []
    for each in prompt:
        if not isinstance(each, list):
            raise invalid("prompt must be a string, a list of strings, token ids, or a list of token ids.", "prompt")
        if not each:
            raise invalid("prompt must not be empty.", "prompt")
        check_length(each, ready.max_model_len)
        prompts.append(TokenPrompt(token_ids(each, vocab_size, "prompt")))
    return prompts


def check_length(ids: list[Any], max_model_len: int) -> None:
    """Refuse a prompt that is longer than the context; the tokenizer process counts exactly."""
    if len(ids) > max_model_len:
        raise invalid(
            f"This model's maximum context length is {max_model_len} tokens. However, your request has {len(ids)} "
            "prompt tokens. Please reduce the length of the prompt.",
            "prompt",
            "context_length_exceeded",
        )


def token_ids(ids: list[Any], vocab_size: int, name: str) -> bytes:
    """Packed; every id must be one of the model's."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise invalid(f"{name} must hold token ids from 0 to {vocab_size - 1} only.", name)
    return array("i", ids).tobytes()


def bounded_logprobs(value: int | None, name: str, limits: Limits) -> int:
    """-1 if it was not given."""
    most = limits.max_logprobs
    return number(value, -1, name, lambda v: 0 <= v <= most, f"between 0 and {most}")


def _min_tokens(value: int | None, max_tokens: int | None) -> int:
    most = _I32_MAX if max_tokens is None else max_tokens
    return number(value, 0, "min_tokens", lambda v: 0 <= v <= most, f"between 0 and max_tokens ({most})")


def _allowed_token_ids(ids: list[int] | None, ready: ExecutorReady) -> bytes:
    """Ascending, each once; empty where all are allowed."""
    if ids is None:
        return b""
    if not ids:
        raise invalid("allowed_token_ids must not be empty.", "allowed_token_ids")
    if ready.device == "cuda":
        raise invalid("allowed_token_ids is not supported on GPUs.", "allowed_token_ids")
    return token_ids(sorted(set(ids)), ready.vocab_size, "allowed_token_ids")


def _bad_words(words: list[str], ready: ExecutorReady) -> tuple[str, ...]:
    if words and ready.device == "cuda":
        raise invalid("bad_words is not supported on GPUs.", "bad_words")
    if len(words) > MAX_BAD_WORDS:
        raise invalid(f"bad_words must have at most {MAX_BAD_WORDS} words, got {len(words)}.", "bad_words")
    if not all(word.strip() for word in words):
        raise invalid("bad_words must not contain an empty word.", "bad_words")
    if any(len(word) > MAX_BAD_WORD_CHARACTERS for word in words):
        raise invalid(f"bad_words must have words of at most {MAX_BAD_WORD_CHARACTERS} characters.", "bad_words")
    return tuple(words)


def _check_something_may_be_drawn(
    stop_token_ids: bytes, ignore_eos: bool, allowed: bytes, ready: ExecutorReady
) -> None:
    """Until min_tokens no token is drawn that ends the answer: some token must be left."""
    ends = set(unpack_i32(stop_token_ids))
    if not ignore_eos:
        ends.update(unpack_i32(ready.eos_token_ids))
    if allowed and ends.issuperset(unpack_i32(allowed)):
        raise invalid("allowed_token_ids must hold a token that can be drawn before min_tokens.", "allowed_token_ids")
    if len(ends) >= ready.vocab_size:
        raise invalid("stop_token_ids must leave a token that can be drawn before min_tokens.", "stop_token_ids")


def _seed(seed: int | None) -> int:
    """64 bits; negative seeds count from the top."""
    if seed is None:
        return int.from_bytes(os.urandom(8), "little")
    checked = number(seed, 0, "seed", lambda s: _SEED_MIN <= s <= _SEED_MAX, "a 64-bit integer")
    return checked & (2**64 - 1)


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> tuple[bytes, bytes]:
    if not bias:
        return b"", b""
    by_id: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < vocab_size):
            raise invalid(
                f"logit_bias must have token ids from 0 to {vocab_size - 1} as keys, got {shortened(key)!r}.",
                "logit_bias",
            )
        if not -100 <= value <= 100:
            raise invalid(f"logit_bias must have values between -100 and 100, got {value}.", "logit_bias")
        by_id[int(key)] = value
    ordered = sorted(by_id)
    return pack_i32(ordered), pack_f32(by_id[token] for token in ordered)
