"""The samplers of all slots: what each sequence asked for, and what drawing its next token depends on.

A slot's state is a pure function of (sampling parameters, choice, prompt, tokens generated so far): ``reset`` rebuilds
it from the ids, ``sample`` advances it by the token it draws, and both ways lead to the same state. A uniform depends
on the request's seed, the choice and the position of the token alone, never on the batch or on how often a sequence was
interrupted. ARCHITECTURE.md, "Sampling", is the definition; the arithmetic is in ``kernels/``.

This module knows no page, no model and no message other than the parameters and the log-probability columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from ringserve.kernels.logprobs import RowLogprobs
from ringserve.kernels.penalties import TokenCounts
from ringserve.kernels.row_sampler import Draw, NumpyRowSampler, RowSampler
from ringserve.kernels.sampling import SAMPLED_TOKEN
from ringserve.messages.columns import pack_f32, pack_i32
from ringserve.messages.logprobs import LogprobColumns
from ringserve.messages.sampling import SamplingParams

NO_FINITE_LOGIT = "the model gave no finite logit for any token that may be drawn"

_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Sampled:
    """A step's tokens."""

    token_ids: list[int | None]
    """One for each row; None where the row is in ``failed``."""
    logprobs: LogprobColumns | None
    """One entry for each drawn token (failed rows have none); None where no row asked."""
    failed: list[tuple[int, str]]
    """(slot, reason)."""


def known_biases(sampling: SamplingParams, vocab_size: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Ids and values of the logit bias, of tokens that the model has."""
    ids = np.frombuffer(sampling.logit_bias_ids, dtype=np.int32)
    known = (ids >= 0) & (ids < vocab_size)
    return ids[known].astype(np.int64), np.frombuffer(sampling.logit_bias_values, dtype=np.float32)[known]


def end_ids(sampling: SamplingParams, eos_token_ids: Sequence[int], vocab_size: int) -> NDArray[np.int64]:
    """The tokens that min_tokens hides, ascending."""
    ends = set(np.frombuffer(sampling.stop_token_ids, dtype=np.int32).tolist())
    if not sampling.ignore_eos:
        ends.update(eos_token_ids)
    return np.array(sorted(i for i in ends if 0 <= i < vocab_size), dtype=np.int64)


def allowed_ids(sampling: SamplingParams, vocab_size: int) -> NDArray[np.int64] | None:
    """The tokens that may be drawn, of those that the model has; None: all."""
    if not sampling.allowed_token_ids:
        return None
    ids = np.frombuffer(sampling.allowed_token_ids, dtype=np.int32).astype(np.int64)
    return ids[(ids >= 0) & (ids < vocab_size)]


def bad_words(sampling: SamplingParams) -> list[tuple[int, ...]]:
    """Sequences of tokens that are not to be generated."""
    ids = np.frombuffer(sampling.bad_word_ids, dtype=np.int32).tolist()
    words, start = [], 0
    for length in np.frombuffer(sampling.bad_word_lengths, dtype=np.int32).tolist():
        words.append(tuple(ids[start : start + length]))
        start += length
    return words


def has_penalties(sampling: SamplingParams) -> bool:
    """Whether the tokens that occurred matter."""
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0


class _Slot:
    """One sequence's sampler."""

    def __init__(
        self,
        sampling: SamplingParams,
        choice: int,
        token_ids: NDArray[np.int32],
        num_prompt_tokens: int,
        eos_token_ids: Sequence[int],
        vocab_size: int,
    ) -> None:
        self.sampling = sampling
        self.choice = choice
        self.length = len(token_ids)
        self.num_prompt_tokens = num_prompt_tokens
        self.key = (sampling.seed & _WORD, sampling.seed >> 32 & _WORD)
        self.bias_ids, self.bias_values = known_biases(sampling, vocab_size)
        self.end_ids = end_ids(sampling, eos_token_ids, vocab_size)
        self.allowed_ids = allowed_ids(sampling, vocab_size)
        self.bad_words = [word for word in bad_words(sampling) if 0 <= word[-1] < vocab_size]
        self.num_remembered = max(map(len, self.bad_words), default=1) - 1
        self.remembered = self._last(token_ids[num_prompt_tokens:].tolist())
        """Generated tokens that a bad word may have begun with."""
        self.has_penalties = has_penalties(sampling)
        self.counts = (
            TokenCounts(token_ids[:num_prompt_tokens], token_ids[num_prompt_tokens:]) if self.has_penalties else None
        )
        # What does not change from token to token is looked at once: these are asked at every step.
        self._hides_ends_until = num_prompt_tokens + sampling.min_tokens if len(self.end_ids) else 0
        self._always_changes_logits = bool(
            self.has_penalties or self.allowed_ids is not None or self.bad_words or len(self.bias_ids)
        )

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the next token is just the largest logit."""
        return self.sampling.temperature == 0.0 and not self._changes_logits

    @property
    def _hides_ends(self) -> bool:
        return self.length < self._hides_ends_until

    @property
    def _changes_logits(self) -> bool:
        return self._always_changes_logits or self._hides_ends

    def process(self, row: NDArray[np.float32]) -> NDArray[np.float32]:
        """The mask of allowed tokens, bias, penalties, the masks of bad words and of min_tokens; the row itself where
        there is nothing to do."""
        if not self._changes_logits:
            return row
        if self.allowed_ids is None:
            row = row.copy()
        else:
            allowed = row[self.allowed_ids]
            row = np.full_like(row, -np.inf)
            row[self.allowed_ids] = allowed
        row[self.bias_ids] += self.bias_values
        if self.counts is not None:
            sampling = self.sampling
            self.counts.penalize(
                row, sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty
            )
        for word in self.bad_words:
            if self.remembered[len(self.remembered) - len(word) + 1 :] == list(word[:-1]):
                row[word[-1]] = -np.inf
        if self._hides_ends:
            row[self.end_ids] = -np.inf
        return row

    def draw(self, row: NDArray[np.float32]) -> Draw:
        """How the next token is drawn from its logits."""
        sampling = self.sampling
        return Draw(
            self.process(row),
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            counter=(self.length & _WORD, self.choice & _WORD, SAMPLED_TOKEN, 0),
            key=self.key,
        )

    def append(self, token_id: int) -> None:
        """Advance by the token drawn."""
        self.length += 1
        if self.counts is not None:
            self.counts.add_generated(token_id)
        if self.num_remembered:
            self.remembered = self._last([*self.remembered, token_id])

    def _last(self, generated: list[int]) -> list[int]:
        return generated[max(0, len(generated) - self.num_remembered) :]


class Sampler:
    """Samplers for slots ``0 .. num_slots - 1``; ``rows`` does the arithmetic (numpy's by default)."""

    def __init__(
        self, vocab_size: int, eos_token_ids: Sequence[int], num_slots: int, rows: RowSampler | None = None
    ) -> None:
        self._rows = NumpyRowSampler() if rows is None else rows
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._slots: list[_Slot | None] = [None] * num_slots

    def reset(
        self,
        slot: int,
        sampling: SamplingParams,
        choice: int,
        token_ids: NDArray[np.int32] | Sequence[int],
        num_prompt_tokens: int,
    ) -> None:
        """Give ``slot`` to a sequence with these tokens (prompt and generated ones)."""
        ids = np.asarray(token_ids, dtype=np.int32)
        self._slots[slot] = _Slot(sampling, choice, ids, num_prompt_tokens, self._eos_token_ids, self._vocab_size)

    def sample(self, slots: Sequence[int], logits: NDArray[np.float32], best: Sequence[int] | None = None) -> Sampled:
        """Draw one token for each of ``slots`` (distinct) from its row of ``logits [rows, vocab]`` and advance it.
        ``best``: ``logits.argmax(axis=1).tolist()``, if the caller knows it.

        A row that nothing can be drawn from is reported and its slot stays as it was. Raises KeyError for a slot that
        was never reset.
        """
        states = [self._state(slot) for slot in slots]
        token_ids: list[int | None] = [None] * len(states)
        greedy = [i for i, state in enumerate(states) if state.is_plain_greedy]
        if greedy:
            if best is None:
                # Whole arrays where all rows are greedy, as they often are: a copy of rows reads all of their logits.
                rows: list[int] | slice = greedy if len(greedy) < len(states) else slice(None)
                largest: list[int] = logits[rows].argmax(axis=1).tolist()
            else:
                largest = [best[i] for i in greedy]
            for i, token_id in zip(greedy, largest, strict=True):
                # argmax finds a NaN first: such rows take the slow path.
                if isfinite(logits.item(i, token_id)):
                    token_ids[i] = token_id
        others = [i for i, token_id in enumerate(token_ids) if token_id is None]
        if others:
            drawn = self._rows.draw([states[i].draw(logits[i]) for i in others])
            for i, token in zip(others, drawn, strict=True):
                token_ids[i] = token
        failed = [(slot, NO_FINITE_LOGIT) for slot, token in zip(slots, token_ids, strict=True) if token is None]
        columns = None
        if any(state.sampling.logprobs >= 0 for state in states):
            entries = self._logprobs(states, token_ids, logits)
            columns = _pack(entries) if any(entry is not None for entry in entries) else None
        for state, token in zip(states, token_ids, strict=True):
            if token is not None:
                state.append(token)
        return Sampled(token_ids, columns, failed)

    def prompt_logprobs(
        self, logits: NDArray[np.float32], next_token_ids: Sequence[int] | NDArray[np.int32], k: int
    ) -> LogprobColumns:
        """Log probabilities of tokens ``next_token_ids [n]`` given the rows ``logits [n, vocab]`` before them."""
        ids = np.asarray(next_token_ids).tolist()
        return _pack(list(self._rows.logprobs(list(logits), ids, [k] * len(ids))))

    def _logprobs(
        self, states: list[_Slot], token_ids: list[int | None], logits: NDArray[np.float32]
    ) -> list[RowLogprobs | None]:
        """One entry for each drawn token; None for those that nobody asked for."""
        drawn = [(i, token) for i, token in enumerate(token_ids) if token is not None]
        asked = [(i, token) for i, token in drawn if states[i].sampling.logprobs >= 0]
        entries = self._rows.logprobs(
            [logits[i] for i, _ in asked],
            [token for _, token in asked],
            [states[i].sampling.logprobs for i, _ in asked],
        )
        found = {i: entry for (i, _), entry in zip(asked, entries, strict=True)}
        return [found.get(i) for i, _ in drawn]

    def _state(self, slot: int) -> _Slot:
        state = self._slots[slot]
        if state is None:
            raise KeyError(f"slot {slot} was never reset")
        return state


def _pack(rows: list[RowLogprobs | None]) -> LogprobColumns:
    entries = [row for row in rows if row is not None]
    return LogprobColumns(
        counts=pack_i32(0 if row is None else len(row.token_ids) for row in rows),
        token_ids=pack_i32(token_id for row in entries for token_id in row.token_ids),
        values=pack_f32(value for row in entries for value in row.values),
        ranks=pack_i32(row.rank for row in entries),
    )
