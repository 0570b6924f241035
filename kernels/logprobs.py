"""Log probabilities of a row of logits: ``x_j - log(sum_i exp(x_i))``, sums in float64."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, log

import numpy as np
from numpy.typing import NDArray

from ringserve.kernels.top_k import top_k_ids

MINUS_INFINITY = -9999.0
"""Stands for -inf wherever log probabilities travel."""


@dataclass(frozen=True)
class RowLogprobs:
    """The chosen token's log probability, and the most likely ones'."""

    token_ids: list[int]
    """The chosen one, then the k most likely in descending order (ties in ascending id)."""
    values: list[float]
    rank: int
    """1 + the number of tokens that are more likely than the chosen one."""


def row_logprobs(row: NDArray[np.float32], token_id: int, k: int) -> RowLogprobs:
    """Of ``row [vocab]``. NaN counts as -inf; a row without a finite logit gives MINUS_INFINITY throughout."""
    top = float(row.max())
    if not isfinite(top):
        row = np.nan_to_num(row, nan=-np.inf, posinf=float(np.finfo(np.float32).max), neginf=-np.inf)
        top = float(row.max())
    ids = [token_id, *top_k_ids(row, k).tolist()]
    if isfinite(top):
        with np.errstate(over="ignore"):  # to -inf, as it should be
            shifted = row - np.float32(top)
        log_sum = log(float(np.exp(shifted).sum(dtype=np.float64)))
        # In this order: top may be so large that nothing that is added to it changes it.
        logprobs = (row[ids].astype(np.float64) - top) - log_sum
        values = [value if isfinite(value) else MINUS_INFINITY for value in logprobs.tolist()]
    else:
        values = [MINUS_INFINITY] * len(ids)
    return RowLogprobs(ids, values, 1 + int(np.count_nonzero(row > row[token_id])))
