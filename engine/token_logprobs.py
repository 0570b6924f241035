"""Columns of log probabilities to the parts that clients see, with each token's text and bytes."""

from __future__ import annotations

from ringserve.engine.token_text import TokenText
from ringserve.messages.columns import unpack_f32, unpack_i32
from ringserve.messages.logprobs import CandidateLogprob, LogprobColumns, TokenLogprob


class LogprobReader:
    """Reads ``LogprobColumns`` front to back, one token at a time."""

    def __init__(self, columns: LogprobColumns, tokens: TokenText) -> None:
        self._tokens = tokens
        self._counts = unpack_i32(columns.counts)
        self._ids = unpack_i32(columns.token_ids)
        self._values = unpack_f32(columns.values)
        self._ranks = unpack_i32(columns.ranks)
        self._position = 0
        self._entry = 0
        self._rank = 0

    def __len__(self) -> int:
        """Tokens in all."""
        return len(self._counts)

    def skip(self, count: int) -> None:
        """Pass over ``count`` tokens."""
        for _ in range(count):
            candidates = self._counts[self._position]
            self._position += 1
            self._entry += candidates
            self._rank += candidates > 0

    def take(self) -> TokenLogprob | None:
        """The next token; None if no log probability was asked for."""
        candidates = self._counts[self._position]
        self._position += 1
        if candidates == 0:
            return None
        first, self._entry = self._entry, self._entry + candidates
        rank = self._ranks[self._rank]
        self._rank += 1
        token_id = self._ids[first]
        top = tuple(
            CandidateLogprob(i, self._tokens.text(i), self._tokens.raw(i), value)
            for i, value in zip(self._ids[first + 1 : self._entry], self._values[first + 1 : self._entry], strict=True)
        )
        return TokenLogprob(
            token_id, self._tokens.text(token_id), self._tokens.raw(token_id), self._values[first], rank, top
        )


def without_logprob(token_id: int, tokens: TokenText) -> TokenLogprob:
    """A prompt's first token: it has no log probability."""
    return TokenLogprob(token_id, tokens.text(token_id), tokens.raw(token_id), None, 0)
