"""Arrays at cache lines, small ones side by side."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from ringserve.kernels.cpu.aligned import CHUNK, LARGE_PAGE, Arena, aligned_zeros

SHAPES = [(0, 3), (1,), (7, 5), (1000, 33), (LARGE_PAGE // 4,), (LARGE_PAGE + 3,), (CHUNK // 2, 2)]


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_alignment(dtype: type) -> None:
    arena = Arena()
    assert aligned_zeros((LARGE_PAGE + 3,), dtype).ctypes.data % LARGE_PAGE == 0
    for zeros in (aligned_zeros, arena.zeros):
        for shape in SHAPES:
            array = zeros(shape, dtype)
            assert array.shape == shape
            assert array.dtype == np.dtype(dtype)
            assert array.size == 0 or array.ctypes.data % 64 == 0
            assert not array.any()
            assert array.flags.c_contiguous


def test_an_arenas_arrays_do_not_overlap() -> None:
    arena = Arena()
    rng = np.random.default_rng(0)
    arrays = [arena.zeros((int(size),), np.uint8) for size in rng.integers(1, LARGE_PAGE, 60)]
    for value, array in enumerate(arrays):
        array[:] = value
    del arena
    assert all((array == value).all() for value, array in enumerate(arrays))
    spans = sorted((array.ctypes.data, array.nbytes) for array in arrays)
    near = [next_start - (start + size) < 64 for (start, size), (next_start, _) in pairwise(spans)]
    assert sum(near) > 50


@pytest.mark.parametrize("size", [1 << 60, 1 << 70])
def test_more_than_there_is(size: int) -> None:
    with pytest.raises(MemoryError, match=str(size)):
        aligned_zeros((size,), np.uint8)
