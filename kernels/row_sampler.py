"""What the samplers do with rows of logits, whoever computes it: the largest, a draw, log probabilities.

``NumpyRowSampler`` is the implementation that needs nothing but numpy; ``kernels/cpu/row_sampler.py`` is compiled.
Both follow ``kernels/sampling.py``, ``kernels/philox.py`` and ``kernels/logprobs.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ringserve.kernels.logprobs import RowLogprobs, row_logprobs
from ringserve.kernels.philox import philox4x32, uniforms
from ringserve.kernels.sampling import clean, draw

Row = NDArray[np.float32]


@dataclass(frozen=True)
class Draw:
    """One row's draw: how, and the Philox counter and key of its uniform."""

    row: Row
    temperature: float
    """0: the largest logit."""
    top_k: int
    top_p: float
    min_p: float
    counter: tuple[int, int, int, int]
    key: tuple[int, int]


class RowSampler(Protocol):
    """Rows are float32 ``[vocab]`` with adjacent elements; results are in the rows' order."""

    def draw(self, draws: Sequence[Draw]) -> list[int | None]:
        """A token for each; None where no logit is finite."""

    def logprobs(self, rows: Sequence[Row], token_ids: Sequence[int], ks: Sequence[int]) -> list[RowLogprobs]:
        """Of a token and the k most likely, for each row."""


class NumpyRowSampler:
    """A ``RowSampler`` in numpy."""

    def draw(self, draws: Sequence[Draw]) -> list[int | None]:
        if not draws:
            return []
        counters = np.array([entry.counter for entry in draws], dtype=np.uint32)
        keys = np.array([entry.key for entry in draws], dtype=np.uint32)
        numbers = uniforms(philox4x32(counters, keys)[:, 0]).tolist()
        return [self._draw(entry, number) for entry, number in zip(draws, numbers, strict=True)]

    def logprobs(self, rows: Sequence[Row], token_ids: Sequence[int], ks: Sequence[int]) -> list[RowLogprobs]:
        return [row_logprobs(row, token_id, k) for row, token_id, k in zip(rows, token_ids, ks, strict=True)]

    @staticmethod
    def _draw(entry: Draw, uniform: float) -> int | None:
        row = clean(entry.row)
        if row is None:
            return None
        if entry.temperature == 0.0:
            return int(row.argmax())
        return draw(row, entry.temperature, entry.top_k, entry.top_p, entry.min_p, uniform)
