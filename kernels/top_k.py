"""The k largest of a row, without sorting the row.

The k-th largest of the maxima of blocks bounds the k-th largest value from below (k blocks hold at least one value each
that is not smaller), so only the few values above it are sorted.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK = 128


def top_k_ids(row: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Ids of the ``min(k, n)`` largest values of ``row [n]`` in descending order; ties in ascending id. No NaN allowed."""
    size = len(row)
    k = min(k, size)
    if k <= 0:
        return np.empty(0, dtype=np.int64)
    if k == size:
        return np.argsort(-row, kind="stable")
    num_blocks = size // BLOCK
    if 2 * k <= num_blocks:
        maxima = row[: num_blocks * BLOCK].reshape(num_blocks, BLOCK).max(axis=1)
        bound = np.partition(maxima, num_blocks - k)[num_blocks - k]
    else:
        bound = np.partition(row, size - k)[size - k]
    ids = np.flatnonzero(row >= bound)
    return ids[np.argsort(-row[ids], kind="stable")[:k]]
