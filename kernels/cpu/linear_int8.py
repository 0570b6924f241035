"""Linear layers with int8 weights and 8-bit activations.

Weights are symmetric int8 with one float32 scale for each output channel j; activations (``quantize.py``) unsigned with
a scale and a zero point for each row i and group g of ``GROUP`` = 64 inputs::

    out[i, j] = wscale[j] * sum_g xscale[i, g] * (sum_(k in g) xq[i, k] * wq[j, k] - zero[i, g] * sum_(k in g) wq[j, k])
                + bias[j]

What is in parentheses is an exact integer; the outer sum is float32, along g in ascending order. Packed, K padded to
whole groups with zeros::

    weights      [panel][k / 4][column 0..47][k % 4]    int8, 64-byte aligned
    corrections  [panel][k / 64][column 0..47]          int16: the sum of the group's weights

The block function is called from compiled code, on one thread, for a range of panels of ``PANEL`` = 48 columns::

    int8_block(level, w, corrections, wscale, bias, x, ldx, xscale, ldxs, k_pad, out, ldo, m, n, panel_first,
               panel_last, accumulate)

* ``level``: ``features.AVX512`` or ``PORTABLE``, passed through;
* ``w``, ``corrections``, ``wscale``, ``bias``: addresses; the last two of ``n_pad`` float32 (bias zeros if none);
* ``x``: address of uint8 ``[m, ldx]``, ``k_pad = padded_k(k)`` used; ``xscale``: of uint32 ``[m, ldxs]``,
  ``k_pad / 64`` used: what ``quantize.quantize_row`` writes;
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
)
from ringserve.kernels.cpu.llvm import I32, I64, V16F32, V16I16, V16I32
from ringserve.kernels.cpu.quantize import GROUP, emit_scale_and_zero

ROWS = 4
"""Rows of the largest register tile: 4 x 3 vectors of integer sums and as many of float sums."""

_UNROLL = 4
_STEPS = GROUP // 4


def padded_k(k: int) -> int:
    """Elements of a row of x."""
    return -(-k // GROUP) * GROUP


def quantize_weight(weight: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """int8 ``[n, k]`` and one scale for each row ``[n]``: ``weight ~ q * scale``, |q| <= 127."""
    scale = np.abs(weight).max(axis=1, initial=0.0).astype(np.float32) / np.float32(127)
    # Rows so small that the inverse would be infinite count as zeros.
    scale[scale < np.finfo(np.float32).tiny] = 0.0
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    return np.rint(weight * inverse[:, None]).astype(np.int8), scale


def pack_int8(weight: NDArray[np.int8], zeros: Zeros = aligned_zeros) -> tuple[NDArray[np.int8], NDArray[np.int16]]:
    """int8 ``[n, k]`` to panels ``[n_pad / 48, k_pad / 4, 48, 4]`` and corrections ``[n_pad / 48, k_pad / 64, 48]``."""
    n, k = weight.shape
    k_pad = padded_k(k)
    packed = zeros((padded(n) // PANEL, k_pad // 4, PANEL, 4), np.int8)
    corrections = zeros((padded(n) // PANEL, k_pad // GROUP, PANEL), np.int16)
    for panel, correction, first in zip(packed, corrections, range(0, n, PANEL), strict=True):
        rows = weight[first : first + PANEL]
        columns = np.zeros((PANEL, k_pad), np.int8)
        columns[: len(rows), :k] = rows
        panel[...] = columns.reshape(PANEL, -1, 4).transpose(1, 0, 2)
        correction[...] = columns.reshape(PANEL, -1, GROUP).sum(axis=2, dtype=np.int16).T
    return packed, corrections


@intrinsic  # type: ignore[untyped-decorator]
def _tile(context: Any, level: Any, rows: Any, numbers: Any) -> Any:
    """The register tile for 1 to ``ROWS`` rows and one panel. Addresses, and strides in bytes:

    ``_tile(level, rows, (w, corrections, wscale, bias, x, ldx, xscale, ldxs, groups, out, ldo, accumulate, ahead,
    ahead_step))``
    """
    native = has_avx512(level)

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        values = cgutils.unpack_tuple(b, args[2])
        llvm.switch(b, args[1], ROWS, lambda rows: _emit_tile(b, rows, native, *values))
        return ctx.get_dummy_value()

    return types.void(level, types.int64, types.UniTuple(types.int64, len(numbers))), gen


def _emit_tile(
    b: Any, rows: int, native: bool, w: Any, corrections: Any, wscale: Any, bias: Any, x: Any, ldx: Any, *rest: Any
) -> None:
    xscale, ldxs, groups, out, ldo, accumulate, ahead, ahead_step = rest
    const = llvm.const
    # With one or two rows the sums of weights are computed on the way: their memory traffic would cost more.
    computed = rows <= 2
    x_starts, scale_starts = llvm.row_addresses(b, x, ldx, rows), llvm.row_addresses(b, xscale, ldxs, rows)
    before, outer, inner = b.block, b.append_basic_block("groups"), b.append_basic_block("quads")
    group_done, done = b.append_basic_block("group_done"), b.append_basic_block("sums")
    b.branch(outer)

    b.position_at_end(outer)
    group, ahead_group = b.phi(I64), b.phi(I64)
    sums = [[b.phi(V16F32) for _ in range(VECTORS)] for _ in range(rows)]
    w_group = b.add(w, b.mul(group, const(GROUP * PANEL)))
    x_offset = b.mul(group, const(GROUP))
    at_correction = b.add(corrections, b.mul(group, const(2 * PANEL)))
    b.branch(inner)

    b.position_at_end(inner)
    step, ahead_at = b.phi(I64), b.phi(I64)
    dots = [[b.phi(V16I32) for _ in range(VECTORS)] for _ in range(rows)]
    totals = [b.phi(V16I32) for _ in range(VECTORS)] if computed else []
    new_dots, new_totals = [list(row) for row in dots], list(totals)
    at = b.add(w_group, b.mul(step, const(4 * PANEL)))
    x_at = b.add(x_offset, b.mul(step, const(4)))
    row_at = [llvm.row_address(b, x_starts, ldx, row, x_at) for row in range(rows)]
    ones = llvm.all_lanes(0x01010101)
    for unrolled in range(_UNROLL):
        vectors = [llvm.load(b, at, 64 * (VECTORS * unrolled + j), V16I32, 64) for j in range(VECTORS)]
        if computed:
            new_totals = [
                llvm.dot_u8s8(b, total, ones, vector, native) for total, vector in zip(new_totals, vectors, strict=True)
            ]
        for row in range(rows):
            quad = llvm.splat(b, llvm.load(b, row_at[row], 4 * unrolled, I32), V16I32)
            new_dots[row] = [
                llvm.dot_u8s8(b, dot, quad, vector, native) for dot, vector in zip(new_dots[row], vectors, strict=True)
            ]
    if rows > ROWS // 2:
        for line in range(AHEAD_LINES):
            llvm.prefetch_line(b, ahead_at, 64 * line, AHEAD_LEVEL)
    next_step, next_ahead = b.add(step, const(_UNROLL)), b.add(ahead_at, ahead_step)
    llvm.incoming([step, ahead_at], [const(0), ahead_group], outer)
    llvm.incoming([step, ahead_at], [next_step, next_ahead], inner)
    for row in range(rows):
        llvm.incoming(dots[row], [llvm.zeros(V16I32)] * VECTORS, outer)
        llvm.incoming(dots[row], new_dots[row], inner)
    if computed:
        llvm.incoming(totals, [llvm.zeros(V16I32)] * VECTORS, outer)
        llvm.incoming(totals, new_totals, inner)
    b.cbranch(b.icmp_signed("<", next_step, const(_STEPS)), inner, group_done)

    b.position_at_end(group_done)
    next_group = b.add(group, const(1))
    llvm.incoming([group, ahead_group], [const(0), ahead], before)
    llvm.incoming([group, ahead_group], [next_group, next_ahead], group_done)
    if not computed:
        new_totals = [b.sext(llvm.load(b, at_correction, 32 * j, V16I16, 32), V16I32) for j in range(VECTORS)]
    weight_sums = [b.sitofp(total, V16F32) for total in new_totals]
    new_sums = []
    for row in range(rows):
        at_scale = llvm.row_address(b, scale_starts, ldxs, row, b.mul(group, const(4)))
        scale, minus_zero = emit_scale_and_zero(b, llvm.load(b, at_scale, 0, I32))
        # Exact: all of it stays below 2**24.
        exact = [
            llvm.fma(b, minus_zero, weight_sum, b.sitofp(dot, V16F32))
            for weight_sum, dot in zip(weight_sums, new_dots[row], strict=True)
        ]
        new_sums.append([llvm.fma(b, value, scale, sums[row][j]) for j, value in enumerate(exact)])
        llvm.incoming(sums[row], [llvm.zeros(V16F32)] * VECTORS, before)
        llvm.incoming(sums[row], new_sums[row], group_done)
    b.cbranch(b.icmp_signed("<", next_group, groups), outer, done)

    b.position_at_end(done)
    scales = [llvm.load(b, wscale, 64 * j, V16F32) for j in range(VECTORS)]
    biases = [llvm.load(b, bias, 64 * j, V16F32) for j in range(VECTORS)]
    tile = [[llvm.fma(b, new_sums[row][j], scales[j], biases[j]) for j in range(VECTORS)] for row in range(rows)]
    llvm.store_tile(b, tile, out, ldo, accumulate)


@compiled
def int8_block(
    level: Level,
    w: int,
    corrections: int,
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
        w_panel, c_panel = w + panel * panel_bytes, corrections + panel * groups * (2 * PANEL)
        column = panel * PANEL
        s_panel, b_panel = wscale + 4 * column, bias + 4 * column
        width = min(PANEL, n - column)
        row = 0
        for tile in range(tiles):
            rows = m // tiles + (1 if tile < m % tiles else 0)
            target, stride, add = out + (row * ldo + column) * 4, ldo * 4, accumulate
            if width < PANEL:
                target, stride, add = scratch, PANEL * 4, 0
            numbers = (
                w_panel,
                c_panel,
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
