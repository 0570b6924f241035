"""numpy arrays that begin at a cache line."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

CACHE_LINE = 64


def aligned_zeros(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Zeros, C order, the first element at a multiple of 64 bytes. Memory is touched only when written."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + CACHE_LINE, dtype=np.uint8)
    start = -raw.ctypes.data % CACHE_LINE
    return raw[start : start + size].view(dtype).reshape(shape)
