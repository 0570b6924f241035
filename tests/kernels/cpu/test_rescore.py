"""The largest logits of a row, computed anew, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ringserve.kernels.cpu.aligned import aligned_zeros
from ringserve.kernels.cpu.compiled import compiled
from ringserve.kernels.cpu.rescore import CANDIDATES, rescore_row
from ringserve.kernels.cpu.row_best import best_key, key_columns

TILE = 48
STRIDE = 3
"""Rows whose keys take turns."""


@compiled
def _run(
    x: Any, weight: Any, bias: Any, logits: Any, columns: int, tile: int, keys: Any, row: int, rescore: bool
) -> None:
    address = logits.ctypes.data
    if rescore:
        rescore_row(
            x.ctypes.data, weight.ctypes.data, bias.ctypes.data, x.shape[0], address, columns, tile,
            keys.ctypes.data + 8 * row, keys.shape[1],
        )  # fmt: skip
    else:
        for i in range(keys.shape[0]):
            keys[i, row] = best_key(address + 4 * tile * i, min(tile, columns - tile * i), tile * i)


class Row:
    """An input, an output layer, and the logits that a layer with errors makes of them."""

    def __init__(self, columns: int, k: int, error: float, seed: int) -> None:
        rng = np.random.default_rng([columns, k, seed])
        self.columns = columns
        self.x: NDArray[np.float32] = aligned_zeros((k,), np.float32)
        self.x[:] = rng.standard_normal(k)
        self.weight = (rng.standard_normal((columns, k)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        self.bias = rng.standard_normal(columns).astype(np.float32)
        floats = (self.weight.astype(np.uint32) << 16).view(np.float32)
        self.exact: NDArray[np.float64] = floats.astype(np.float64) @ self.x + self.bias
        self.room: NDArray[np.float32] = aligned_zeros((columns + 16,), np.float32)
        self.room[columns:] = np.inf  # counts for nothing
        self.logits = self.room[:columns]
        self.logits[:] = self.exact + error * rng.standard_normal(columns)
        self.keys = np.full((-(-columns // TILE), STRIDE), np.iinfo(np.int64).max, np.int64)

    def rescore(self) -> NDArray[np.float32]:
        """The logits before."""
        before = self.logits.copy()
        for again in (False, True):
            _run(self.x, self.weight, self.bias, self.room, self.columns, TILE, self.keys, 1, again)
        return before

    def check_keys(self) -> None:
        """They are those of the logits as they are now; nobody else's were touched."""
        made = self.keys.copy()
        _run(self.x, self.weight, self.bias, self.room, self.columns, TILE, self.keys, 1, False)
        np.testing.assert_array_equal(made, self.keys)
        assert (made[:, [0, 2]] == np.iinfo(np.int64).max).all()
        assert key_columns(made[:, 1].max()) == self.logits.argmax()


@pytest.mark.parametrize("columns", [1, 40, 48, 7 * 48, 8 * 48 + 1, 1000, 5003])
@pytest.mark.parametrize("k", [16, 48, 64, 576])
def test_the_largest_are_exact(columns: int, k: int) -> None:
    for seed in range(4):
        row = Row(columns, k, 1.0, seed)
        before = row.rescore()
        changed = row.logits != before
        largest = np.argsort(-before, kind="stable")[:CANDIDATES]
        np.testing.assert_allclose(row.logits[largest], row.exact[largest], atol=1e-4)
        np.testing.assert_allclose(row.logits[changed], row.exact[changed], atol=1e-4)
        # Nothing else than the best of the chosen tiles: all of them at least as large as the last tile's best one.
        bests = np.sort([before[first : first + TILE].max() for first in range(0, columns, TILE)])
        assert len(bests) < CANDIDATES or (changed <= (before >= bests[-CANDIDATES])).all()
        row.check_keys()


def test_the_best_one_is_found_where_the_error_hid_it() -> None:
    found = {True: 0, False: 0}
    for seed in range(50):
        row = Row(3000, 64, 1.5, seed)
        before = row.rescore()
        found[True] += row.logits.argmax() == row.exact.argmax()
        found[False] += before.argmax() == row.exact.argmax()
    assert found[True] == 50
    assert found[False] < 45


def test_equal_logits_are_computed_in_few_tiles() -> None:
    row = Row(2000, 64, 0.0, 0)
    row.logits[:] = -3.0
    before = row.rescore()
    changed = np.flatnonzero(row.logits != before)
    assert set(changed) <= set(range(CANDIDATES * TILE))
    np.testing.assert_allclose(row.logits[: CANDIDATES * TILE], row.exact[: CANDIDATES * TILE], atol=1e-4)
    row.check_keys()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_no_numbers(value: float) -> None:
    """Infinities are replaced by what is right, a row with NaN stays one."""
    row = Row(1000, 64, 0.0, 0)
    row.logits[700] = value
    row.rescore()
    assert np.isnan(row.logits).any() == np.isnan(value)
    row.check_keys()
    row = Row(1000, 64, 0.0, 0)
    row.logits[:] = value
    row.rescore()
    assert np.isnan(row.logits).all() == np.isnan(value)
    row.check_keys()


def test_a_row_does_not_depend_on_its_place() -> None:
    row, again = Row(1000, 64, 0.5, 0), Row(1000, 64, 0.5, 0)
    row.rescore()
    moved = np.zeros(64 + 1, np.float32)
    moved[1:] = again.x
    again.x = moved[1:]  # another alignment
    again.rescore()
    np.testing.assert_array_equal(row.logits, again.logits)
