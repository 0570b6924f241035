"""A step's tokens, from the scheduler to the tokenizer process."""

from __future__ import annotations

from ringserve.messages.logprobs import LogprobColumns, PromptLogprobs
from ringserve.messages.requests import FinishReason
from ringserve.messages.stats import EngineStats, StepTimes
from ringserve.messages.structs import Message, Part


class SequenceStart(Part, frozen=True):
    """What is known when a sequence's first output leaves the scheduler."""

    row: int
    queued_ns: int
    """Scheduler: the request entered the queue."""
    first_scheduled_ns: int
    num_cached_tokens: int = 0
    num_preemptions: int = 0


class SequenceFinish(Part, frozen=True):
    """A sequence's end. Exactly one for each (request, choice)."""

    row: int
    reason: FinishReason
    stop_token_id: int | None = None
    """The stop token (not eos) that ended it."""
    num_preemptions: int = 0
    message: str = ""
    """With reason ``error``."""


class TokenOutputs(Message, frozen=True):
    """A step's new tokens: one row for each (request, choice). A row may have no token (a finish alone)."""

    request_ids: bytes
    """uint64."""
    choices: bytes
    """int32."""
    token_counts: bytes
    """int32."""
    token_ids: bytes
    """int32, sum(token_counts)."""
    starts: tuple[SequenceStart, ...]
    finishes: tuple[SequenceFinish, ...]
    logprobs: LogprobColumns | None
    """One entry for each token."""
    prompt_logprobs: tuple[PromptLogprobs, ...]
    """For choice 0; positions come in ascending order, each once."""
    times: StepTimes | None
    stats: EngineStats
    sent_ns: int = 0
