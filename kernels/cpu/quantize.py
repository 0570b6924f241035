"""Activations on their way into an int8 linear layer: bytes, with a scale for each 64.

Called from compiled code for one row; addresses, sizes in elements::

    quantize_row(x, k, k_pad, q, scales)   float32 [k] -> uint8 [k_pad], float32 [k_pad / 64]

scale = max|x| / 127 over the group, ``q = round(x * (127 / max|x|)) + 128`` (nearest, ties to even), so that
``x ~ (q - 128) * scale``; beyond k the values are zero (q = 128). A group with NaN or infinity gets a NaN or infinite
scale, so that the layer's output shows it; one whose maximum is below 1e-30 counts as zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ringserve.kernels.cpu.compiled import compiled
from ringserve.kernels.cpu.llvm import (
    F32,
    I8,
    V16F32,
    V16I32,
    fma,
    largest_of_lanes,
    load,
    load_f32,
    smax,
    splat,
    stack_floats_384,
    store,
    store_f32,
)

GROUP = 64
TINY = 1e-30

_ABSOLUTE = 0x7FFFFFFF
_ROUND = 12582912.0
"""1.5 * 2**23: adding it leaves the rounded integer in the low bits of a float32."""

_V16I8 = ir.VectorType(I8, 16)


@compiled
def quantize_row(x: int, k: int, k_pad: int, q: int, scales: int) -> None:
    """See the top of this file."""
    whole = k // GROUP
    for group in range(whole):
        _quantize_group(x + 4 * GROUP * group, q + GROUP * group, scales + 4 * group)
    if whole * GROUP < k_pad:
        rest = stack_floats_384()
        for i in range(GROUP):
            at = whole * GROUP + i
            store_f32(rest + 4 * i, load_f32(x + 4 * at) if at < k else np.float32(0))
        _quantize_group(rest, q + GROUP * whole, scales + 4 * whole)


@compiled
def quantize_rows(x: int, m: int, k: int, k_pad: int, q: int, scales: int) -> None:
    """``quantize_row`` of ``m`` rows that follow one another: x ``[m, k]``, q ``[m, k_pad]``, scales."""
    for row in range(m):
        quantize_row(x + 4 * row * k, k, k_pad, q + row * k_pad, scales + row * (k_pad // 16))


@intrinsic  # type: ignore[untyped-decorator]
def _quantize_group(context: Any, x: Any, q: Any, scale: Any) -> Any:
    """One group: 64 float32 at ``x``, 64 bytes at ``q``, one float32 at ``scale``."""

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        x, q, scale = args
        values = [load(b, x, 64 * i, V16F32) for i in range(4)]
        # The largest magnitude, compared as integers: the order is that of the floats, infinity and NaN on top.
        mask = ir.Constant(V16I32, [_ABSOLUTE] * 16)
        sizes = [b.and_(b.bitcast(value, V16I32), mask) for value in values]
        pairs = [smax(b, sizes[0], sizes[1]), smax(b, sizes[2], sizes[3])]
        largest = b.bitcast(largest_of_lanes(b, smax(b, *pairs)), F32)
        tiny = b.fcmp_ordered("<", largest, F32(TINY))
        largest = b.select(tiny, F32(0.0), largest)
        store(b, b.fdiv(largest, F32(127.0)), scale, 0)
        inverse = b.select(tiny, F32(0.0), b.fdiv(F32(127.0), largest))
        inverses, rounding = splat(b, inverse, V16F32), ir.Constant(V16F32, [_ROUND] * 16)
        offset = ir.Constant(V16I32, [128] * 16)
        for i, value in enumerate(values):
            bits = b.bitcast(fma(b, value, inverses, rounding), V16I32)
            store(b, b.trunc(b.add(bits, offset), _V16I8), q, 16 * i, 1)
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), gen
