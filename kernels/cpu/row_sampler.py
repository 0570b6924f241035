"""The compiled ``RowSampler``: one call for all rows, without the GIL."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from ringserve.kernels.cpu.compiled import is_kept
from ringserve.kernels.cpu.row_draw import Workspace, draw_rows
from ringserve.kernels.cpu.row_logprobs import logprob_rows
from ringserve.kernels.logprobs import MINUS_INFINITY, RowLogprobs, row_logprobs
from ringserve.kernels.row_sampler import Draw, Row

MOST_LOGPROBS = 256
"""Larger k go through numpy: the compiled function sorts by insertion."""


class CpuRowSampler:
    """A ``RowSampler`` for one thread and rows of ``vocab`` logits."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._space = Workspace(vocab)

    @staticmethod
    def is_compiled() -> bool:
        """Whether ``warm_up`` takes no time."""
        return is_kept(draw_rows) and is_kept(logprob_rows)

    def warm_up(self) -> None:
        """Compile everything now, or load it, rather than at the first request."""
        row = np.zeros(self._vocab, dtype=np.float32)
        self.draw([Draw(row, 1.0, 0, 1.0, 0.0, (0, 0, 0, 0), (0, 0))])
        self.logprobs([row], [0], [1])

    def draw(self, draws: Sequence[Draw]) -> list[int | None]:
        """A token for each; None where no logit is finite."""
        if not draws:
            return []
        rows = self._addresses([entry.row for entry in draws])
        parameters = np.array([(entry.temperature, entry.top_p, entry.min_p) for entry in draws], dtype=np.float64)
        top_ks = np.array([entry.top_k for entry in draws], dtype=np.int64)
        counters = np.array([(*entry.counter, *entry.key) for entry in draws], dtype=np.uint32)
        tokens = np.empty(len(draws), dtype=np.int64)
        space = self._space
        draw_rows(
            rows,
            self._vocab,
            parameters,
            top_ks,
            counters,
            tokens,
            space.x,
            space.weights,
            space.values,
            space.maxima,
            space.ids,
            space.ones,
        )
        return [None if token < 0 else token for token in tokens.tolist()]

    def logprobs(self, rows: Sequence[Row], token_ids: Sequence[int], ks: Sequence[int]) -> list[RowLogprobs]:
        """Of a token and the k most likely, for each row."""
        if not rows:
            return []
        most = min(max(ks), self._vocab)
        if most > MOST_LOGPROBS:
            return [row_logprobs(row, token_id, k) for row, token_id, k in zip(rows, token_ids, ks, strict=True)]
        out_ids = np.empty((len(rows), 1 + most), dtype=np.int64)
        out_values = np.empty((len(rows), 1 + most), dtype=np.float64)
        ranks = np.empty(len(rows), dtype=np.int64)
        space = self._space
        logprob_rows(
            self._addresses(rows),
            self._vocab,
            np.array(token_ids, dtype=np.int64),
            np.array(ks, dtype=np.int64),
            out_ids,
            out_values,
            ranks,
            space.x,
            space.weights,
            space.values,
            space.maxima,
            space.ids,
            space.ones,
        )
        columns = zip(out_ids.tolist(), out_values.tolist(), ranks.tolist(), ks, strict=True)
        return [_entry(ids, values, rank, 1 + min(k, self._vocab)) for ids, values, rank, k in columns]

    def _addresses(self, rows: Sequence[Row]) -> NDArray[np.int64]:
        for row in rows:
            if row.dtype != np.float32 or row.shape != (self._vocab,) or row.strides != (4,):
                raise ValueError(f"a row must be {self._vocab} adjacent float32, not {row.dtype} {row.shape}")
        return np.array([row.__array_interface__["data"][0] for row in rows], dtype=np.int64)


def _entry(ids: list[int], values: list[float], rank: int, length: int) -> RowLogprobs:
    return RowLogprobs(ids[:length], [value if isfinite(value) else MINUS_INFINITY for value in values[:length]], rank)
