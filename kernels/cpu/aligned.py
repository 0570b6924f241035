"""numpy arrays that begin at a cache line and, where they are large, lie in large pages.

A core reads weights from memory 1.5 to 1.8 times as fast through pages of 2 MiB (transparent huge pages of anonymous
memory) as through pages of 4 KiB: the processor's prefetchers stop at the end of a page.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

CACHE_LINE = 64
LARGE_PAGE = 2 << 20
CHUNK = 16 * LARGE_PAGE
"""What an arena takes at once."""

Zeros = Callable[[tuple[int, ...], Any], NDArray[Any]]
"""(shape, dtype) -> zeros that begin at a cache line: ``aligned_zeros`` or an arena's."""


def aligned_zeros(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Zeros, C order, the first element at a multiple of 64 bytes. Memory is touched only when written.

    Raises MemoryError where the machine has not that much.
    """
    size = prod(shape) * np.dtype(dtype).itemsize
    if size >= LARGE_PAGE:
        try:
            area = mmap.mmap(-1, size + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise MemoryError(f"no {size} bytes of memory") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel built without them
                area.madvise(mmap.MADV_HUGEPAGE)
        raw = np.frombuffer(area, dtype=np.uint8)
        start = -raw.ctypes.data % LARGE_PAGE
    else:
        raw = np.zeros(size + CACHE_LINE, dtype=np.uint8)
        start = -raw.ctypes.data % CACHE_LINE
    array: NDArray[Any] = raw[start : start + size].view(dtype).reshape(shape)
    return array


class Arena:
    """Places arrays that are smaller than a large page side by side in large pages. They keep its memory alive."""

    def __init__(self) -> None:
        self._rest: NDArray[np.uint8] = np.empty(0, np.uint8)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """See ``Zeros``."""
        size = prod(shape) * np.dtype(dtype).itemsize
        if size > CHUNK // 4:
            return aligned_zeros(shape, dtype)
        room = -(-size // CACHE_LINE) * CACHE_LINE
        if room > len(self._rest):
            self._rest = aligned_zeros((CHUNK,), np.uint8)
        piece, self._rest = self._rest[:size], self._rest[room:]
        array: NDArray[Any] = piece.view(dtype).reshape(shape)
        return array
