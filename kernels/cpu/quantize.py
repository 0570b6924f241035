"""Activations on their way into an int8 linear layer: bytes, with a scale and a zero point for each 64.

Called from compiled code for one row; addresses, sizes in elements::

    quantize_row(x, k, k_pad, q, scales)   float32 [k] -> uint8 [k_pad], uint32 [k_pad / 64]

``x ~ scale * (q - zero)`` with q and zero in 0 .. 255: the group's range, zero included, in 255 steps. Two signs are
rarely as large as one another, so this halves the error of symmetric int8 where it is largest (mean KL of the default
model 0.0025 instead of 0.0071). Scale and zero point share 32 bits: a float32 whose lowest 8 bits hold the zero point
(``scale_and_zero`` takes them apart). Rounding is to nearest, ties to even; beyond k the values are zero.

A group with NaN or infinity gets a NaN scale, so that the layer's output shows it; one whose range is below 1e-30
counts as zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from ringserve.kernels.cpu.compiled import compiled
from ringserve.kernels.cpu.llvm import (
    F32,
    I8,
    I32,
    V16F32,
    V16I32,
    all_lanes,
    fma,
    largest_of_lanes,
    load,
    load_f32,
    smax,
    smin,
    splat,
    stack_floats_384,
    store,
    store_f32,
)

GROUP = 64
TINY = 1e-30

_ROUND = 12582912.0
"""1.5 * 2**23: adding it leaves the rounded integer in the low bits of a float32."""
_ROUND_BITS = 0x4B400000
_INFINITY_BITS = 0x7F800000
_NAN_BITS = 0x7FC00000
_ZERO_BITS = 0xFF

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


def scale_and_zero(packed: NDArray[np.uint32]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The two parts of what ``quantize_row`` writes for a group."""
    return (packed & np.uint32(~_ZERO_BITS & 0xFFFFFFFF)).view(np.float32), (packed & _ZERO_BITS).astype(np.int64)


def emit_scale_and_zero(b: Any, packed: Any) -> tuple[Any, Any]:
    """For intrinsics: 16 float32 of the scale and of the zero point's negative, from the int32."""
    lanes = splat(b, packed, V16I32)
    scale = b.bitcast(b.and_(lanes, all_lanes(~_ZERO_BITS)), V16F32)
    return scale, b.fneg(b.sitofp(b.and_(lanes, all_lanes(_ZERO_BITS)), V16F32))


@intrinsic  # type: ignore[untyped-decorator]
def _quantize_group(context: Any, x: Any, q: Any, scale: Any) -> Any:
    """One group: 64 float32 at ``x``, 64 bytes at ``q``, 32 bits at ``scale``."""

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        x, q, scale = args
        values = [load(b, x, 64 * i, V16F32) for i in range(4)]
        # The largest magnitude, compared as integers: the order is that of the floats, infinity and NaN on top.
        sizes = [b.and_(b.bitcast(value, V16I32), all_lanes(0x7FFFFFFF)) for value in values]
        finite = b.icmp_signed("<", _largest(b, sizes), I32(_INFINITY_BITS))
        # Floats of one sign order as integers too: the largest of the positive ones, the most negative of the others.
        positive = [smax(b, b.bitcast(value, V16I32), all_lanes(0)) for value in values]
        negative = [
            b.and_(size, b.ashr(b.bitcast(v, V16I32), all_lanes(31))) for size, v in zip(sizes, values, strict=True)
        ]
        high, low = (b.bitcast(_largest(b, some), F32) for some in (positive, negative))
        step = b.fadd(b.fmul(high, F32(1 / 255)), b.fmul(low, F32(1 / 255)))
        # Rounded up to the bits that it has, so that 255 steps reach the end of the range.
        bits = b.and_(b.add(b.bitcast(step, I32), I32(_ZERO_BITS)), I32(~_ZERO_BITS))
        tiny = b.fcmp_ordered("<", step, F32(TINY / 255))
        bits = b.select(tiny, I32(0), b.select(finite, bits, I32(_NAN_BITS)))
        inverse = b.select(tiny, F32(0.0), b.fdiv(F32(1.0), b.bitcast(bits, F32)))
        inverses, rounding = splat(b, inverse, V16F32), ir.Constant(V16F32, [_ROUND] * 16)
        zeros = b.bitcast(fma(b, splat(b, low, V16F32), inverses, rounding), V16I32)
        zeros = smin(b, b.sub(zeros, all_lanes(_ROUND_BITS)), all_lanes(255))
        zero = b.select(finite, b.extract_element(zeros, I32(0)), I32(0))
        store(b, b.or_(bits, zero), scale, 0)
        for i, value in enumerate(values):
            rounded = b.bitcast(fma(b, value, inverses, rounding), V16I32)
            steps = b.add(b.sub(rounded, all_lanes(_ROUND_BITS)), zeros)
            store(b, b.trunc(smax(b, smin(b, steps, all_lanes(255)), all_lanes(0)), _V16I8), q, 16 * i, 1)
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), gen


def _largest(b: Any, vectors: list[Any]) -> Any:
    """The largest of the lanes of four vectors of int32."""
    first, second, third, fourth = vectors
    return largest_of_lanes(b, smax(b, smax(b, first, second), smax(b, third, fourth)))
