"""Activations on their way into an int8 linear layer: rotated in groups of 64, then int8 with a scale for each group.

Called from compiled code for one row; addresses, sizes in elements::

    quantize_row(x, k, k_pad, factors, q, scales)   float32 [k] -> int8 [k_pad], [k_pad / 64] pairs of 32 bits

Each group g of 64 inputs (zeros beyond k) is *rotated*, ``y = H (factors_g * x_g)`` with Sylvester's Hadamard matrix H
(all entries 1 or -1), and then rounded: ``y ~ scale * q``, |q| <= 127, to nearest, ties to even. A few large values
among small ones, which models have in fixed places, would take the small ones' steps away; rotated, all 64 have a share
in each (QuaRot, Ashkboos et al. 2024, rotates whole layers for the same reason).

The layer's ``factors``, float32 ``[k_pad]``, have fixed signs (``input_factors``). They share an input's size out
between activations and weights: inputs that are usually large are made smaller, their weights larger, which then have
more steps where it counts (as in SmoothQuant, Xiao et al. 2022, and AWQ, Lin et al. 2023).
``rotate_weight`` gives the weights the inverse of both, so that products stay what they were.

A pair is the float32 scale and an int32, ``-128 * sum(q)``: what a product with weights stored as w + 128 has too much.

A group with NaN or infinity, or whose rotated values overflow, gets a NaN scale, so that the layer's output shows it;
one whose largest rotated value is below 1e-30 counts as zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from ringserve.kernels.cpu.aligned import aligned_zeros
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
    permute,
    smax,
    splat,
    stack_floats_384,
    store,
    store_f32,
    sum_of_lanes,
)

GROUP = 64
SCALE_WORDS = 2
"""32-bit words that a group has beside its values."""
TINY = 1e-30
ZERO_WEIGHT = 128
"""How the weight 0 is stored."""

LARGEST_FACTOR = 2.0**16

_SIGNS = 0x243F6A8885A308D3
"""Bit i: the sign of value i of a group (the first digits of pi after the point; anything without a pattern will do:
values that are all alike would otherwise end up in one of the rotated ones)."""
_ROUND = 12582912.0
"""1.5 * 2**23: adding it leaves the rounded integer in the low bits of a float32."""
_ROUND_BITS = 0x4B400000
_INFINITY_BITS = 0x7F800000
_NAN_BITS = 0x7FC00000

_V16I8 = ir.VectorType(I8, 16)


@compiled
def quantize_row(x: int, k: int, k_pad: int, factors: int, q: int, scales: int) -> None:
    """See the top of this file."""
    whole = k // GROUP
    for group in range(whole):
        at = 4 * GROUP * group
        _quantize_group(x + at, factors + at, q + GROUP * group, scales + 4 * SCALE_WORDS * group)
    if whole * GROUP < k_pad:
        rest = stack_floats_384()
        for i in range(GROUP):
            at = whole * GROUP + i
            store_f32(rest + 4 * i, load_f32(x + 4 * at) if at < k else np.float32(0))
        at = 4 * GROUP * whole
        _quantize_group(rest, factors + at, q + GROUP * whole, scales + 4 * SCALE_WORDS * whole)


@compiled
def quantize_rows(x: int, m: int, k: int, k_pad: int, factors: int, q: int, scales: int) -> None:
    """``quantize_row`` of ``m`` rows that follow one another: x ``[m, k]``, q ``[m, k_pad]``, scales."""
    for row in range(m):
        words = scales + row * (k_pad // GROUP) * 4 * SCALE_WORDS
        quantize_row(x + 4 * row * k, k, k_pad, factors, q + row * k_pad, words)


def input_factors(weight: NDArray[np.float32], sizes: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """The factors ``[k_pad]`` of a layer ``[n, k]`` whose inputs have the root mean squares ``sizes`` ``[k]``:
    ``sqrt(norm of the input's weights / size)`` in units of its median. Where both are rounded with steps that are the
    same for all inputs of a group, that gives the smallest error (by the inequality of Cauchy and Schwarz). Only signs
    where nothing is known."""
    k = weight.shape[1]
    factors: NDArray[np.float32] = aligned_zeros((-(-k // GROUP) * GROUP,), np.float32)
    factors[:] = np.resize(_signs(), len(factors))
    if sizes is not None:
        norms = np.sqrt(np.square(weight, dtype=np.float64).sum(axis=0))
        known = (norms > TINY) & (sizes > TINY) & np.isfinite(norms) & np.isfinite(sizes)
        if known.any():
            ratios = np.sqrt(norms[known] / sizes[known])
            spread = np.clip(ratios / np.median(ratios), 1 / LARGEST_FACTOR, LARGEST_FACTOR)
            factors[:k][known] *= spread.astype(np.float32)
    return factors


def rotate_weight(weight: NDArray[np.float32], factors: NDArray[np.float32]) -> NDArray[np.float32]:
    """float32 ``[n, k]`` -> ``[n, k_pad]``: the weights of the same layer for inputs that were multiplied by
    ``factors`` and rotated."""
    n, k = weight.shape
    padded = np.zeros((n, len(factors)), np.float32)
    padded[:, :k] = weight / factors[:k]
    rotated: NDArray[np.float32] = (padded.reshape(-1, GROUP) @ (_hadamard() / np.float32(GROUP))).reshape(n, -1)
    return rotated


def _hadamard() -> NDArray[np.float32]:
    numbers = range(GROUP)
    return np.array([[-1.0 if (i & j).bit_count() % 2 else 1.0 for j in numbers] for i in numbers], np.float32)


def _signs() -> NDArray[np.float32]:
    return np.array([-1.0 if _SIGNS >> i & 1 else 1.0 for i in range(GROUP)], np.float32)


@intrinsic
def _quantize_group(context: Any, x: Any, factors: Any, q: Any, scale: Any) -> Any:
    """One group: 64 float32 at ``x`` and at ``factors``, 64 bytes at ``q``, a pair of 32 bits at ``scale``."""

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        x, factors, q, scale = args
        values = _rotate(b, [b.fmul(load(b, x, 64 * i, V16F32), load(b, factors, 64 * i, V16F32)) for i in range(4)])
        # The largest magnitude, compared as integers: the order is that of the floats, infinity and NaN on top.
        sizes = [b.and_(b.bitcast(value, V16I32), all_lanes(0x7FFFFFFF)) for value in values]
        bits = largest_of_lanes(b, smax(b, smax(b, sizes[0], sizes[1]), smax(b, sizes[2], sizes[3])))
        finite, largest = b.icmp_signed("<", bits, I32(_INFINITY_BITS)), b.bitcast(bits, F32)
        tiny = b.fcmp_ordered("<", largest, F32(TINY))
        step = b.select(tiny, F32(0.0), b.fmul(largest, F32(1 / 127)))
        store(b, b.select(finite, b.bitcast(step, I32), I32(_NAN_BITS)), scale, 0)
        inverse = b.select(tiny, F32(0.0), b.fdiv(F32(127.0), largest))
        inverses, rounding = splat(b, inverse, V16F32), ir.Constant(V16F32, [_ROUND] * 16)
        total = None
        for i, value in enumerate(values):
            rounded = b.sub(b.bitcast(fma(b, value, inverses, rounding), V16I32), all_lanes(_ROUND_BITS))
            store(b, b.trunc(rounded, _V16I8), q, 16 * i, 1)
            total = rounded if total is None else b.add(total, rounded)
        store(b, b.mul(sum_of_lanes(b, total), I32(-ZERO_WEIGHT)), scale, 4)
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), gen


def _rotate(b: Any, values: list[Any]) -> list[Any]:
    """The Hadamard matrix times the four vectors of a group, by butterflies: sums and differences of values whose
    indices differ in one bit."""
    for stride in (1, 2):
        pairs = [(i, i + stride) for i in range(4) if not i & stride]
        for i, j in pairs:
            values[i], values[j] = b.fadd(values[i], values[j]), b.fsub(values[i], values[j])
    for stride in (1, 2, 4, 8):
        sign = ir.Constant(V16F32, [-1.0 if lane & stride else 1.0 for lane in range(16)])
        values = [fma(b, value, sign, permute(b, value, [lane ^ stride for lane in range(16)])) for value in values]
    return values
