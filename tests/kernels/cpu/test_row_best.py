"""The largest of a row, found in parts, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from ringserve.kernels.cpu.aligned import aligned_zeros
from ringserve.kernels.cpu.compiled import compiled
from ringserve.kernels.cpu.row_best import best_key, key_columns


@compiled
def _keys(x: int, n: int, part: int, keys: NDArray[np.int64]) -> None:
    for i in range(keys.shape[0]):
        first = i * part
        keys[i] = best_key(x + 4 * first, min(part, n - first), first)


def _best(row: NDArray[np.float32], part: int) -> int:
    room = aligned_zeros((len(row) + 16,), np.float32)
    room[:] = np.inf  # what lies beyond the row counts for nothing
    room[: len(row)] = row
    keys = np.empty(-(-len(row) // part), np.int64)
    _keys(room.ctypes.data, len(row), part, keys)
    return int(key_columns(keys.max()))


@pytest.mark.parametrize("n", [1, 15, 16, 17, 192, 1000])
@pytest.mark.parametrize("part", [16, 48, 192])
def test_is_what_argmax_finds(n: int, part: int) -> None:
    rng = np.random.default_rng([n, part])
    for case in range(40):
        row = rng.standard_normal(n).astype(np.float32) * 10
        match case % 8:
            case 1:
                row = np.round(row)  # ties: the first one
            case 2:
                row = -np.abs(row) - 1
            case 3:
                row[:] = rng.choice([-0.0, 0.0, -1.0], n)
            case 4:
                row[:] = -np.inf
            case 5:
                row[rng.integers(n)] = rng.choice([np.nan, -np.nan])
                row[rng.integers(n)] = np.inf
            case 6:
                row[rng.integers(n)] = np.inf
            case 7:
                row[:] = np.float32(-3.4e38)
        assert _best(row, part) == int(row.argmax())
