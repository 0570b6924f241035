"""What ``LLM.generate`` returns; names and shapes are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(slots=True)
class Logprob:
    """Of one token at one position."""

    logprob: float
    """Natural logarithm, from the unprocessed logits."""
    rank: int
    """1: the most likely token."""
    decoded_token: str


LogprobsOfPosition = dict[int, Logprob]
"""By token id: the token itself first, then the most likely ones."""


@dataclass(slots=True)
class CompletionOutput:
    """One choice."""

    index: int
    """Which of the ``n`` choices."""
    text: str
    token_ids: list[int]
    """The generated ones, with the token that ended it."""
    cumulative_logprob: float | None
    """Sum over the tokens; None unless ``logprobs`` were asked for."""
    logprobs: list[LogprobsOfPosition] | None
    """One entry for each token; None unless asked for."""
    finish_reason: Literal["stop", "length", "error"]
    stop_reason: int | str | None
    """The stop string or stop token id that ended it; None: end of sequence, or another reason."""
    error: str | None = None
    """With finish_reason "error": what happened to this choice (the others are not affected)."""


@dataclass(slots=True)
class RequestMetrics:
    """Seconds on the clock of ``time.monotonic()``."""

    arrival_time: float
    """The request was given to the engine (a batch's requests are, one after the other, as there is room)."""
    first_scheduled_time: float
    first_token_time: float | None
    """None: no token was generated."""
    finished_time: float


@dataclass(slots=True)
class RequestOutput:
    """One prompt's answer."""

    request_id: str
    prompt: str | None
    """The text given, or what the chat template made of the conversation; None for token ids."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[LogprobsOfPosition | None] | None
    """One entry for each token of the prompt, None for the first; None unless asked for."""
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    """Tokens of the prompt whose keys and values were reused."""
