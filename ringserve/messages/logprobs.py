"""Log probabilities: in columns from the executor to the tokenizer process, with the tokens' text behind it.

The executor names sequences by slot, the scheduler by request; what the frontend gets lies in its rows.
"""

from __future__ import annotations

from ringserve.messages.structs import Part


class LogprobColumns(Part, frozen=True):
    """Log probabilities of several tokens, flattened.

    Entry ``i`` has ``counts[i]`` candidates (0: none were asked for). Its first candidate is the token itself; the
    most likely tokens follow in descending order (the token itself may be among them again).
    """

    counts: bytes
    """int32, one for each token."""
    token_ids: bytes
    """int32, sum(counts)."""
    values: bytes
    """float32 natural logarithms, sum(counts). -inf never travels: it is -9999.0."""
    ranks: bytes
    """int32, one for each token with candidates: 1 for the most likely token."""


class SlotPromptLogprobs(Part, frozen=True):
    """PromptLogprobs by slot."""

    slot: int
    start: int
    columns: LogprobColumns


class PromptLogprobs(Part, frozen=True):
    """Log probabilities of the prompt tokens ``[start, start + len(columns.counts))``; position 0 has count 0."""

    request_id: int
    start: int
    columns: LogprobColumns


class CandidateLogprob(Part, frozen=True):
    """A token's text and log probability."""

    token_id: int
    token: str
    raw: bytes
    logprob: float


class TokenLogprob(Part, frozen=True):
    """One position: the token itself, and the most likely ones."""

    token_id: int
    token: str
    raw: bytes
    logprob: float | None
    """None for a prompt's first token."""
    rank: int
    top: tuple[CandidateLogprob, ...] = ()
