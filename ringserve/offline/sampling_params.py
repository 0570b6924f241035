"""How ``LLM`` is told to sample. Names and defaults are vLLM's, ranges and meanings the HTTP API's: the checks are
those of ``ringserve.frontend.validation``, so that both sides refuse the same values in the same words."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import msgspec

from ringserve.frontend import validation
from ringserve.frontend.errors import ApiError
from ringserve.frontend.protocol import CompletionBody
from ringserve.frontend.validation import Limits
from ringserve.messages.requests import OutputParams
from ringserve.messages.sampling import SamplingDefaults
from ringserve.messages.sampling import SamplingParams as SamplingMessage
from ringserve.messages.startup import ExecutorReady

B = TypeVar("B", bound=msgspec.Struct)

_ANY = 2**31 - 1
_ANY_ENGINE = Limits(
    model_name="",
    ready=ExecutorReady(_ANY, _ANY, b"", 1, 1, 1, 1, "", "", "", "", SamplingDefaults()),
    max_logprobs=_ANY,
    max_n=_ANY,
    max_choices=_ANY,
)
"""Limits for what is known before there is an engine."""


@dataclass(kw_only=True)
class SamplingParams:
    """Sampling of one prompt. None for a number: the model's own default (its generation configuration).

    Raises:
        ValueError: a value is out of range or of the wrong type; the message names the parameter.
    """

    n: int = 1
    """Choices for each prompt."""
    temperature: float | None = 1.0
    """0 is greedy."""
    top_p: float | None = 1.0
    top_k: int | None = 0
    """0 and -1: off."""
    min_p: float | None = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = 1.0
    seed: int | None = None
    """None: drawn anew for each prompt."""
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """None: what fits."""
    min_tokens: int = 0
    logprobs: int | None = None
    """0: of the chosen tokens; k: and of the k most likely ones."""
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    """No other token is drawn; not on GPUs."""
    bad_words: Sequence[str] | None = None
    """The sequences of tokens that stand for them are not completed; not on GPUs."""

    def __post_init__(self) -> None:
        engine_params(self, _ANY_ENGINE)

    def clone(self) -> SamplingParams:
        """A copy that shares nothing with this one: a change of either leaves the other as it is."""
        return copy.deepcopy(self)


@dataclass(frozen=True)
class EngineParams:
    """The same as the engine takes it."""

    sampling: SamplingMessage
    output: OutputParams
    n: int
    max_tokens: int | None


def engine_params(params: SamplingParams, limits: Limits) -> EngineParams:
    """Check, and fill in every default; a seed is drawn here where none was given.

    Raises:
        ValueError: with the parameter's name.
    """
    with value_errors():
        body = _body(params)
        max_tokens = None if params.max_tokens is None else validation.completion_max_tokens(body)
        return EngineParams(
            sampling=validation.sampling_params(
                body,
                limits,
                logprobs=validation.bounded_logprobs(params.logprobs, "logprobs", limits),
                prompt_logprobs=validation.bounded_logprobs(params.prompt_logprobs, "prompt_logprobs", limits),
                max_tokens=max_tokens,
            ),
            output=validation.output_params(body, limits, echo=False),
            n=validation.choices(body, limits),
            max_tokens=max_tokens,
        )


@contextmanager
def value_errors() -> Iterator[None]:
    """The HTTP API's refusals as ValueError."""
    try:
        yield
    except ApiError as error:
        raise ValueError(error.message) from None


def convert(values: Mapping[str, Any], of: type[B]) -> B:
    """``values`` as ``of``.

    Raises:
        ValueError: one is of the wrong type; the message begins with its name.
    """
    try:
        return msgspec.convert(values, of)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at ")
        path = place.rpartition("`$.")[2].rstrip("`")
        raise ValueError(f"{path}: {what[:1].lower()}{what[1:]}") from None


def plain_text(text: object, place: str) -> str:
    """``text``, if a message can carry it.

    Raises:
        ValueError: no str, or half of a surrogate pair in it.
    """
    if not isinstance(text, str):
        raise ValueError(f"{place} must be text, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{place} holds half of a surrogate pair ({text[error.start]!r}), which is no text") from None
    return text


def _body(params: SamplingParams) -> CompletionBody:
    values: dict[str, Any] = {field.name: getattr(params, field.name) for field in fields(params)}
    bias = values["logit_bias"]
    if isinstance(bias, Mapping):
        values["logit_bias"] = {str(token_id): value for token_id, value in bias.items()}
    for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
        if isinstance(values[name], Iterator):
            # Checked here and read again for every prompt: from the second time on nothing would be left of it.
            raise ValueError(f"{name} must be a list, not what can be read only once ({type(values[name]).__name__})")
        if isinstance(values[name], Iterable) and not isinstance(values[name], str):
            values[name] = list(values[name])
    prompt_logprobs = values.pop("prompt_logprobs")
    if prompt_logprobs is not None and type(prompt_logprobs) is not int:
        raise ValueError(f"prompt_logprobs must be an int, got {prompt_logprobs!r}")
    body = convert(values | {"prompt": ""}, CompletionBody)
    for text in [body.stop] if isinstance(body.stop, str) else body.stop or ():
        plain_text(text, "stop")
    for word in body.bad_words or ():
        plain_text(word, "bad_words")
    return body
