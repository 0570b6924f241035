"""RMSNorm of rows: y = x / sqrt(mean(x^2) + eps) * weight.

One order of additions: four partial sums of 16 lanes, each over every fourth vector, then folded.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringserve.kernels.cpu.compiled import compiled
from ringserve.kernels.cpu.vector import add, broadcast, multiply, multiply_add, sum_lanes
from ringserve.kernels.cpu.vector_memory import load, store, store_bfloat16


@compiled
def inverse_rms(x: int, size: int, eps: Any) -> Any:
    """1 / sqrt(mean(x^2) + eps) of ``size`` float32 at ``x``; ``size`` a multiple of 16."""
    zero = broadcast(np.float32(0))
    s0, s1, s2, s3 = zero, zero, zero, zero
    i = 0
    while i + 64 <= size:
        v0, v1, v2, v3 = load(x + 4 * i), load(x + 4 * i + 64), load(x + 4 * i + 128), load(x + 4 * i + 192)
        s0, s1 = multiply_add(v0, v0, s0), multiply_add(v1, v1, s1)
        s2, s3 = multiply_add(v2, v2, s2), multiply_add(v3, v3, s3)
        i += 64
    while i < size:
        v0 = load(x + 4 * i)
        s0 = multiply_add(v0, v0, s0)
        i += 16
    total = sum_lanes(add(add(s0, s1), add(s2, s3)))
    return np.float32(1) / np.sqrt(total / np.float32(size) + eps)


@compiled
def rms_norm(x: int, weight: int, size: int, eps: Any, out: int) -> None:
    """A row of float32 to a row of float32 (it may be the same one)."""
    scale = broadcast(inverse_rms(x, size, eps))
    for i in range(0, size, 16):
        store(out + 4 * i, multiply(multiply(load(x + 4 * i), scale), load(weight + 4 * i)))


@compiled
def rms_norm_bfloat16(x: int, weight: int, size: int, eps: Any, out: int) -> None:
    """A row of float32 to a row of bfloat16."""
    scale = broadcast(inverse_rms(x, size, eps))
    for i in range(0, size, 16):
        store_bfloat16(out + 2 * i, multiply(multiply(load(x + 4 * i), scale), load(weight + 4 * i)))
