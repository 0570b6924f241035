"""Penalties on tokens that have occurred, as Hugging Face (repetition) and OpenAI (presence, frequency) define them.

For a token that occurs in the prompt or the answer, ``x = x / r if x > 0 else x * r`` (repetition penalty ``r``); then,
for one that occurs ``c > 0`` times in the answer, ``x = x - (c * frequency + presence)``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """Which tokens occurred, and how often in the answer. Grows with the distinct tokens, not with the vocabulary."""

    def __init__(self, prompt: NDArray[np.int32], generated: NDArray[np.int32]) -> None:
        ids = np.unique(np.concatenate([prompt, generated])).astype(np.int64)
        self._size = len(ids)
        self._ids = np.concatenate([ids, np.zeros(64, dtype=np.int64)])
        self._counts = np.zeros(len(self._ids), dtype=np.int64)
        self._index = {token_id: i for i, token_id in enumerate(ids.tolist())}
        for token_id in generated.tolist():
            self._counts[self._index[token_id]] += 1

    def add_generated(self, token_id: int) -> None:
        """One more token of the answer."""
        at = self._index.get(token_id)
        if at is None:
            at = self._index[token_id] = self._size
            if at == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[at] = token_id
            self._size += 1
        self._counts[at] += 1

    def penalize(self, row: NDArray[np.float32], repetition: float, presence: float, frequency: float) -> None:
        """Apply the penalties to ``row [vocab]`` in place."""
        ids, counts = self._ids[: self._size], self._counts[: self._size]
        values = row[ids]
        if repetition != 1.0:
            factor = np.float32(repetition)
            values = np.where(values > 0, values / factor, values * factor)
        if presence != 0.0 or frequency != 0.0:
            values = values - np.where(counts > 0, counts * frequency + presence, 0.0).astype(np.float32)
        row[ids] = values
