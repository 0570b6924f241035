"""numpy arrays that begin at a cache line and, where they are large, lie in large pages.

A core reads weights from memory 1.5 to 1.8 times as fast through pages of 2 MiB (transparent huge pages of anonymous
memory) as through pages of 4 KiB: the processor's prefetchers stop at the end of a page.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

CACHE_LINE = 64
LARGE_PAGE = 2 << 20


def aligned_zeros(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Zeros, C order, the first element at a multiple of 64 bytes. Memory is touched only when written."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    if size >= LARGE_PAGE:
        area = mmap.mmap(-1, size + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
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
