"""The k largest of a row, without sorting the row.

The k-th largest of the maxima of blocks bounds the k-th largest value from below (k blocks hold at least one value each
that is not smaller), so only the few values above it are sorted.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCKS = (128, 32)
"""Lengths of a block: the longer ones are quicker, the shorter ones serve a larger k."""


def top_k_ids(row: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Ids of the ``min(k, n)`` largest values of ``row [n]``, descending; ties in ascending id. No NaN allowed."""
    size = len(row)
    k = min(k, size)
    if k <= 0:
        return np.empty(0, dtype=np.int64)
    if k == size:
        return np.argsort(-row, kind="stable")
    ids = np.flatnonzero(row >= lower_bound(row, k))
    return ids[np.argsort(-row[ids], kind="stable")[:k]]


def lower_bound(row: NDArray[np.float32], k: int) -> np.float32:
    """A value that at least ``k`` values of ``row`` reach: near the k-th largest, or that itself. 0 < k < n."""
    size = len(row)
    for block in BLOCKS:
        num_blocks = size // block
        if 2 * k <= num_blocks:
            maxima = row[: num_blocks * block].reshape(num_blocks, block).max(axis=1)
            bound: np.float32 = np.partition(maxima, num_blocks - k)[num_blocks - k]
            return bound
    exact: np.float32 = np.partition(row, size - k)[size - k]
    return exact
