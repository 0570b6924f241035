"""A step's text, from the tokenizer process to the frontend."""

from __future__ import annotations

from ringserve.messages.logprobs import TokenLogprob
from ringserve.messages.requests import FinishReason
from ringserve.messages.stats import EngineStats, StepTimes
from ringserve.messages.structs import Message, Part


class TextStart(Part, frozen=True):
    """What is known with a choice's first output."""

    row: int
    num_prompt_tokens: int
    num_cached_tokens: int
    received_ns: int
    """Frontend."""
    tokenized_ns: int
    """Tokenizer: sent to the scheduler."""
    queued_ns: int
    first_scheduled_ns: int
    max_tokens: int
    """After clamping."""
    max_tokens_clamped: bool = False
    prompt_token_ids: bytes = b""
    """With ``echo``."""
    prompt_text: str | None = None
    """With ``echo``: the text given, or the decoded ids."""
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


class TextFinish(Part, frozen=True):
    """A choice's end. Exactly one for each (request, choice)."""

    row: int
    reason: FinishReason
    stop_reason: str | int | None
    """The stop string or stop token id that ended it."""
    num_output_tokens: int
    """Up to and including the token that completed the stop."""
    num_preemptions: int = 0
    message: str = ""
    """With reason ``error``."""


class TextLogprobs(Part, frozen=True):
    """Log probabilities of a row's new tokens. They may come later than their tokens' text, never earlier, and all
    have come by the finish."""

    row: int
    tokens: tuple[TokenLogprob, ...]


class TextOutputs(Message, frozen=True):
    """A step's new text: one row for each (request, choice)."""

    request_ids: bytes
    """uint64."""
    choices: bytes
    """int32."""
    texts: tuple[str, ...]
    token_counts: bytes
    """int32."""
    token_ids: bytes
    """int32, sum(token_counts). Tokens come with the step that made them, even where their text is still held back."""
    starts: tuple[TextStart, ...]
    finishes: tuple[TextFinish, ...]
    logprobs: tuple[TextLogprobs, ...]
    times: StepTimes | None
    stats: EngineStats | None
    tokens_sent_ns: int
    """Scheduler."""
    received_ns: int
    """Tokenizer."""
    sent_ns: int
    """Tokenizer."""
