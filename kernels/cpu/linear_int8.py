"""Linear layers with int8 weights and int8 activations.

Both have a scale for each ``GROUP`` = 64 inputs, weights for each output channel j, activations (``quantize.py``) for
each row i. The inputs of a group are scaled and rotated, the weights the other way round, which leaves products as they
are::

    out[i, j] = sum_g wscale[j, g] * xscale[i, g] * (sum_(k in g) xq[i, k] * wq[j, k]) + bias[j]

What is in parentheses is an exact integer below 2**24; the outer sum is float32, along g in ascending order. Weights
are stored as bytes wq + 128, since the processors' products take one factor without a sign; the 128 * sum(xq) too much
is where a row's sums begin. Packed, K padded to whole groups::

    weights      [panel][k / 4][column 0..47][k % 4]    uint8, 64-byte aligned
    scales       [panel][k / 64][column 0..47]          bfloat16

The block function is called from compiled code, on one thread, for a range of panels of ``PANEL`` = 48 columns::

    int8_block(level, w, wscale, bias, x, ldx, xscale, ldxs, k_pad, out, ldo, m, n, panel_first, panel_last, accumulate)

* ``level``: ``features.AVX512`` or ``PORTABLE``, passed through;
* ``w``, ``wscale``, ``bias``: addresses; the last of ``n_pad`` float32 (zeros if none);
* ``x``: address of int8 ``[m, ldx]``, ``k_pad = padded_k(k)`` used; ``xscale``: of 32-bit words ``[m, ldxs]``,
  ``k_pad / 64 * SCALE_WORDS`` used: what ``quantize.quantize_row`` writes;
* ``out``, ``ldo``, ``m``, ``n``, panels, ``accumulate``: as in ``linear_bf16``.

A row's result is the same, bit for bit, whatever m, its place and the panels computed together are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from ringserve.kernels.cpu import llvm
from ringserve.kernels.cpu.aligned import Zeros, aligned_zeros
from ringserve.kernels.cpu.compiled import compiled
from ringserve.kernels.cpu.features import Level, has_avx512
from ringserve.kernels.cpu.linear_bf16 import (
    AHEAD_LEVEL,
    AHEAD_LINES,
    PANEL,
    VECTORS,
    ahead_address,
    ahead_step,
    copy_columns,
    padded,
    to_bf16,
)
from ringserve.kernels.cpu.llvm import F32, I32, I64, V16F32, V16I16, V16I32
from ringserve.kernels.cpu.quantize import GROUP, SCALE_WORDS, ZERO_WEIGHT, rotate_weight

ROWS = 4
"""Rows of the largest register tile: 4 x 3 vectors of integer sums and as many of float sums."""

CANDIDATES = tuple(1.0 - 0.015 * step for step in range(-1, 9))
"""Scales that are tried, as parts of the one that just reaches a group's largest weight."""

_UNROLL = 4
_STEPS = GROUP // 4


def padded_k(k: int) -> int:
    """Elements of a row of x."""
    return -(-k // GROUP) * GROUP


def quantize_weight(
    weight: NDArray[np.float32], factors: NDArray[np.float32]
) -> tuple[NDArray[np.int8], NDArray[np.uint16]]:
    """float32 ``[n, k]`` -> int8 ``[n, k_pad]`` and bfloat16 scales ``[n, k_pad / 64]``, of the weights for inputs
    quantised with ``factors`` (``quantize.input_factors``): ``rotated ~ q * scale``, |q| <= 127.

    Of ``CANDIDATES`` scales a group takes the one with the smallest sum of squared errors: cutting the largest off is
    often better than coarser steps for all."""
    rotated = rotate_weight(weight, factors)
    groups = rotated.reshape(-1, GROUP)
    # Groups so small that the inverse would be infinite count as zeros.
    largest = np.abs(groups).max(axis=1, initial=0.0)
    q, scales = np.zeros(groups.shape, np.int8), np.zeros(len(groups), np.float32)
    candidates = to_bf16(largest[:, None] / np.float32(127) * np.array(CANDIDATES, np.float32))
    candidates[largest < 1e-30] = 0
    _round_groups(groups, (candidates.astype(np.uint32) << 16).view(np.float32), q, scales)
    return q.reshape(rotated.shape), to_bf16(scales).reshape(len(weight), -1)


@compiled
def _round_groups(groups: Any, candidates: Any, q: Any, scales: Any) -> None:
    limit = np.float32(127)
    for g in range(groups.shape[0]):
        best = np.float32(np.inf)
        for c in range(candidates.shape[1]):
            scale = candidates[g, c]
            if scale == 0:
                continue
            inverse, error = np.float32(1) / scale, np.float32(0)
            for i in range(GROUP):
                value = groups[g, i]
                rounded = min(max(np.rint(value * inverse), -limit), limit)
                error += (rounded * scale - value) ** 2
            if error < best:
                best, scales[g] = error, scale
        if scales[g] != 0:
            inverse = np.float32(1) / scales[g]
            for i in range(GROUP):
                q[g, i] = np.int8(min(max(np.rint(groups[g, i] * inverse), -limit), limit))


def pack_int8(
    weight: NDArray[np.int8], scale: NDArray[np.uint16], zeros: Zeros = aligned_zeros
) -> tuple[NDArray[np.uint8], NDArray[np.uint16]]:
    """What ``quantize_weight`` gives to panels ``[n_pad / 48, k_pad / 4, 48, 4]`` and scales ``[n_pad / 48, k_pad / 64,
    48]``."""
    n, k_pad = weight.shape
    packed = zeros((padded(n) // PANEL, k_pad // 4, PANEL, 4), np.uint8)
    scales = zeros((padded(n) // PANEL, k_pad // GROUP, PANEL), np.uint16)
    for panel, panel_scales, first in zip(packed, scales, range(0, n, PANEL), strict=True):
        rows = weight[first : first + PANEL]
        columns = np.full((PANEL, k_pad), ZERO_WEIGHT, np.uint8)
        columns[: len(rows)] += rows.view(np.uint8)
        panel[...] = columns.reshape(PANEL, -1, 4).transpose(1, 0, 2)
        panel_scales[:, : len(rows)] = scale[first : first + PANEL].T
    return packed, scales


@intrinsic
def _tile(context: Any, level: Any, rows: Any, numbers: Any) -> Any:
    """The register tile for 1 to ``ROWS`` rows and one panel. Addresses, and strides in bytes:

    ``_tile(level, rows, (w, wscale, bias, x, ldx, xscale, ldxs, groups, out, ldo, accumulate, ahead, ahead_step))``
    """
    native = has_avx512(level)

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        values = cgutils.unpack_tuple(b, args[2])
        llvm.switch(b, args[1], range(1, ROWS + 1), lambda rows: _emit_tile(b, rows, native, *values))
        return ctx.get_dummy_value()

    return types.void(level, types.int64, types.UniTuple(types.int64, len(numbers))), gen


def _emit_tile(
    b: Any, rows: int, native: bool, w: Any, wscale: Any, bias: Any, x: Any, ldx: Any, xscale: Any, *rest: Any
) -> None:
    ldxs, groups, out, ldo, accumulate, ahead, ahead_step = rest
    const = llvm.const
    # The compiler is not to unroll the loop over a whole group: it then loads weights in such an order that the
    # processor does not fetch ahead as it should (a fifth of the speed at one row).
    steps = llvm.opaque(b, const(_STEPS))
    x_starts, scale_starts = llvm.row_addresses(b, x, ldx, rows), llvm.row_addresses(b, xscale, ldxs, rows)
    before, outer, inner = b.block, b.append_basic_block("groups"), b.append_basic_block("quads")
    group_done, done = b.append_basic_block("group_done"), b.append_basic_block("sums")
    b.branch(outer)

    b.position_at_end(outer)
    group, ahead_group = b.phi(I64), b.phi(I64)
    sums = [[b.phi(V16F32) for _ in range(VECTORS)] for _ in range(rows)]
    w_group = b.add(w, b.mul(group, const(GROUP * PANEL)))
    x_offset = b.mul(group, const(GROUP))
    at_wscale = b.add(wscale, b.mul(group, const(2 * PANEL)))
    scale_offset = b.mul(group, const(4 * SCALE_WORDS))
    at_scales = [llvm.row_address(b, scale_starts, ldxs, row, scale_offset) for row in range(rows)]
    beginnings = [llvm.splat(b, llvm.load(b, at_scale, 4, I32), V16I32) for at_scale in at_scales]
    b.branch(inner)

    b.position_at_end(inner)
    step, ahead_at = b.phi(I64), b.phi(I64)
    dots = [[b.phi(V16I32) for _ in range(VECTORS)] for _ in range(rows)]
    new_dots = [list(row) for row in dots]
    at = b.add(w_group, b.mul(step, const(4 * PANEL)))
    x_at = b.add(x_offset, b.mul(step, const(4)))
    row_at = [llvm.row_address(b, x_starts, ldx, row, x_at) for row in range(rows)]
    for unrolled in range(_UNROLL):
        vectors = [llvm.load(b, at, 64 * (VECTORS * unrolled + j), V16I32, 64) for j in range(VECTORS)]
        for row in range(rows):
            quad = llvm.splat(b, llvm.load(b, row_at[row], 4 * unrolled, I32), V16I32)
            new_dots[row] = [
                llvm.dot_u8s8(b, dot, vector, quad, native) for dot, vector in zip(new_dots[row], vectors, strict=True)
            ]
    if rows > ROWS // 2:
        for line in range(AHEAD_LINES):
            llvm.prefetch_line(b, ahead_at, 64 * line, AHEAD_LEVEL)
    next_step, next_ahead = b.add(step, const(_UNROLL)), b.add(ahead_at, ahead_step)
    llvm.incoming([step, ahead_at], [const(0), ahead_group], outer)
    llvm.incoming([step, ahead_at], [next_step, next_ahead], inner)
    for row in range(rows):
        llvm.incoming(dots[row], [beginnings[row]] * VECTORS, outer)
        llvm.incoming(dots[row], new_dots[row], inner)
    b.cbranch(b.icmp_signed("<", next_step, steps), inner, group_done)

    b.position_at_end(group_done)
    next_group = b.add(group, const(1))
    llvm.incoming([group, ahead_group], [const(0), ahead], before)
    llvm.incoming([group, ahead_group], [next_group, next_ahead], group_done)
    scales = []
    for j in range(VECTORS):
        bits = b.zext(llvm.load(b, at_wscale, 32 * j, V16I16, 32), V16I32)
        scales.append(b.bitcast(b.shl(bits, llvm.all_lanes(16)), V16F32))
    new_sums = []
    for row in range(rows):
        scale = llvm.splat(b, llvm.load(b, at_scales[row], 0, F32), V16F32)
        parts = [b.fmul(b.sitofp(dot, V16F32), scales[j]) for j, dot in enumerate(new_dots[row])]
        new_sums.append([llvm.fma(b, part, scale, sums[row][j]) for j, part in enumerate(parts)])
        llvm.incoming(sums[row], [llvm.zeros(V16F32)] * VECTORS, before)
        llvm.incoming(sums[row], new_sums[row], group_done)
    b.cbranch(b.icmp_signed("<", next_group, groups), outer, done)

    b.position_at_end(done)
    biases = [llvm.load(b, bias, 64 * j, V16F32) for j in range(VECTORS)]
    tile = [[b.fadd(new_sums[row][j], biases[j]) for j in range(VECTORS)] for row in range(rows)]
    llvm.store_tile(b, tile, out, ldo, accumulate)


@compiled
def int8_block(
    level: Level,
    w: int,
    wscale: int,
    bias: int,
    x: int,
    ldx: int,
    xscale: int,
    ldxs: int,
    k_pad: int,
    out: int,
    ldo: int,
    m: int,
    n: int,
    panel_first: int,
    panel_last: int,
    accumulate: int,
) -> None:
    """Panels ``panel_first .. panel_last - 1`` for all ``m`` rows; see the top of this file."""
    tiles = (m + ROWS - 1) // ROWS
    groups = k_pad // GROUP
    panel_bytes = k_pad * PANEL
    step = ahead_step(tiles)
    scratch = llvm.stack_floats_384()
    for panel in range(panel_first, panel_last):
        w_panel, s_panel = w + panel * panel_bytes, wscale + panel * groups * (2 * PANEL)
        column = panel * PANEL
        b_panel = bias + 4 * column
        width = min(PANEL, n - column)
        row = 0
        for tile in range(tiles):
            rows = m // tiles + (1 if tile < m % tiles else 0)
            target, stride, add = out + (row * ldo + column) * 4, ldo * 4, accumulate
            if width < PANEL:
                target, stride, add = scratch, PANEL * 4, 0
            numbers = (
                w_panel,
                s_panel,
                b_panel,
                x + row * ldx,
                ldx,
                xscale + row * ldxs * 4,
                ldxs * 4,
                groups,
                target,
                stride,
                add,
                ahead_address(tiles, tile, w_panel, panel_bytes),
                step,
            )
            _tile(level, rows, numbers)
            if width < PANEL:
                copy_columns(scratch, out + (row * ldo + column) * 4, ldo, rows, width, accumulate)
            row += rows
