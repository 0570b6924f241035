"""Linear layers in bfloat16: ``out[i, j] = sum_k x[i, k] * w[j, k] + bias[j]``, sums in float32.

Weights are packed in panels of ``PANEL`` = 48 output columns, K padded to a multiple of ``K_UNIT`` = 8 with zeros::

    [panel][k / 2][column 0..47][k % 2]        bfloat16, 64-byte aligned

so that a row of the panel is three vectors for VDPBF16PS. A panel of one layer lies in L2 while all rows pass over it.

The block function is called from compiled code, on one thread, for a range of panels::

    bf16_block(level, w, bias, x, ldx, k_pad, out, ldo, m, n, panel_first, panel_last, accumulate)

* ``level``: ``features.AVX512`` or ``PORTABLE``, passed through (a tuple: the choice is made when compiling);
* ``w``, ``bias``: addresses of the packed weights and of ``n_pad`` float32 (zeros where the layer has no bias; n_pad =
  ``padded(n)``); panel 0 begins at ``w`` whatever ``panel_first`` is;
* ``x``: address of bfloat16 ``[m, ldx]``; columns ``k .. k_pad - 1`` must be zero (finite at least). ``2 * ldx`` bytes
  should not be a multiple of 4096, or rows fight for the same cache sets;
* ``out``: address of float32 ``[m, ldo]``; columns ``48 * panel_first .. min(n, 48 * panel_last)`` are written: nothing
  beyond column n is;
* ``accumulate``: 0 writes, 1 adds to what is there (a residual): ``out + (sum + bias)``.

The additions along K have one fixed order: a row's result is the same, bit for bit, whatever m, its place in x and the
panels computed together are. VDPBF16PS treats denormals as zero and rounds to nearest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from ringserve.kernels.cpu import llvm
from ringserve.kernels.cpu.aligned import aligned_zeros
from ringserve.kernels.cpu.compiled import compiled
from ringserve.kernels.cpu.features import has_avx512
from ringserve.kernels.cpu.llvm import F32, I32, I64, V16F32, V16I32, load_f32, store_f32

VECTORS = 3
PANEL = 16 * VECTORS
K_UNIT = 8
ROWS = 8
"""Rows of the largest register tile: 8 x 3 vectors of sums."""

_UNROLL = K_UNIT // 2


def padded(n: int) -> int:
    """Columns of whole panels."""
    return -(-n // PANEL) * PANEL


def padded_k(k: int) -> int:
    """Elements of a row of x."""
    return -(-k // K_UNIT) * K_UNIT


def to_bf16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round float32 to bfloat16, nearest with ties to even. NaN is not expected."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded: NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded


def pack_bf16(weight: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """bfloat16 ``[n, k]`` (as uint16) to panels ``[n_pad / 48, k_pad / 2, 48, 2]``."""
    n, k = weight.shape
    packed = aligned_zeros((padded(n) // PANEL, padded_k(k) // 2, PANEL, 2), np.uint16)
    for panel, first in zip(packed, range(0, n, PANEL), strict=True):
        rows = weight[first : first + PANEL]
        columns = np.zeros((PANEL, padded_k(k)), np.uint16)
        columns[: len(rows), :k] = rows
        panel[...] = columns.reshape(PANEL, -1, 2).transpose(1, 0, 2)
    return packed


def _tile(rows: int) -> Any:
    """The register tile for ``rows`` rows and one panel; addresses and byte strides."""

    def tile(context: Any, level: Any, w: Any, bias: Any, x: Any, ldx: Any, pairs: Any, out: Any, ldo: Any, add: Any):  # type: ignore[no-untyped-def]
        native = has_avx512(level)

        def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            _emit_tile(b, rows, native, *args[1:])
            return ctx.get_dummy_value()

        return types.void(level, *([types.int64] * 8)), gen

    return intrinsic(tile)


def _emit_tile(b: Any, rows: int, native: bool, w: Any, bias: Any, x: Any, ldx: Any, pairs: Any, out: Any, ldo: Any, add: Any) -> None:  # fmt: skip
    const = llvm.const
    starts = llvm.row_addresses(b, x, ldx, rows)
    end = b.add(w, b.mul(pairs, const(64 * VECTORS)))
    before, loop, done = b.block, b.append_basic_block("pairs"), b.append_basic_block("sums")
    b.branch(loop)
    b.position_at_end(loop)
    at, offset = b.phi(I64), b.phi(I64)
    sums = [[b.phi(V16F32) for _ in range(VECTORS)] for _ in range(rows)]
    new = [list(row) for row in sums]
    row_at = [llvm.row_address(b, starts, ldx, row, offset) for row in range(rows)]
    for step in range(_UNROLL):
        vectors = [llvm.load(b, at, 64 * (VECTORS * step + j), V16I32, 64) for j in range(VECTORS)]
        for row in range(rows):
            pair = llvm.splat(b, llvm.load(b, row_at[row], 4 * step, I32), V16I32)
            for j in range(VECTORS):
                new[row][j] = llvm.dot_bf16(b, new[row][j], pair, vectors[j], native)
    next_at, next_offset = b.add(at, const(64 * VECTORS * _UNROLL)), b.add(offset, const(4 * _UNROLL))
    for phi, first, following in [(at, w, next_at), (offset, const(0), next_offset)]:
        phi.add_incoming(first, before)
        phi.add_incoming(following, loop)
    for row in range(rows):
        for j in range(VECTORS):
            sums[row][j].add_incoming(llvm.zeros(V16F32), before)
            sums[row][j].add_incoming(new[row][j], loop)
    b.cbranch(b.icmp_unsigned("<", next_at, end), loop, done)
    b.position_at_end(done)
    biases = [llvm.load(b, bias, 64 * j, V16F32) for j in range(VECTORS)]
    new = [[b.fadd(new[row][j], biases[j]) for j in range(VECTORS)] for row in range(rows)]
    llvm.store_tile(b, new, out, ldo, add)


_tile_1, _tile_2, _tile_3, _tile_4 = _tile(1), _tile(2), _tile(3), _tile(4)
_tile_5, _tile_6, _tile_7, _tile_8 = _tile(5), _tile(6), _tile(7), _tile(8)


@compiled
def _rows(level: Any, rows: Any, w: Any, bias: Any, x: Any, ldx: Any, pairs: Any, out: Any, ldo: Any, add: Any) -> None:
    if rows == 8:
        _tile_8(level, w, bias, x, ldx, pairs, out, ldo, add)
    elif rows == 7:
        _tile_7(level, w, bias, x, ldx, pairs, out, ldo, add)
    elif rows == 6:
        _tile_6(level, w, bias, x, ldx, pairs, out, ldo, add)
    elif rows == 5:
        _tile_5(level, w, bias, x, ldx, pairs, out, ldo, add)
    elif rows == 4:
        _tile_4(level, w, bias, x, ldx, pairs, out, ldo, add)
    elif rows == 3:
        _tile_3(level, w, bias, x, ldx, pairs, out, ldo, add)
    elif rows == 2:
        _tile_2(level, w, bias, x, ldx, pairs, out, ldo, add)
    else:
        _tile_1(level, w, bias, x, ldx, pairs, out, ldo, add)


@compiled
def bf16_block(level: Any, w: Any, bias: Any, x: Any, ldx: Any, k_pad: Any, out: Any, ldo: Any, m: Any, n: Any, panel_first: Any, panel_last: Any, accumulate: Any) -> None:  # fmt: skip
    """Panels ``panel_first .. panel_last - 1`` for all ``m`` rows; see the top of this file."""
    tiles = (m + ROWS - 1) // ROWS
    pairs = k_pad // 2
    scratch = llvm.stack_floats_384()
    for panel in range(panel_first, panel_last):
        w_panel = w + panel * pairs * (4 * PANEL)
        column = panel * PANEL
        width = min(PANEL, n - column)
        row = 0
        for tile in range(tiles):
            # Tiles of nearly equal height: a last tile of one row would cost as much as one of four.
            rows = m // tiles + (1 if tile < m % tiles else 0)
            x_rows, target = x + row * ldx * 2, out + (row * ldo + column) * 4
            if width == PANEL:
                _rows(level, rows, w_panel, bias + 4 * column, x_rows, ldx * 2, pairs, target, ldo * 4, accumulate)
            else:
                _rows(level, rows, w_panel, bias + 4 * column, x_rows, ldx * 2, pairs, scratch, PANEL * 4, 0)
                _copy_columns(scratch, target, ldo, rows, width, accumulate)
            row += rows


@compiled
def _copy_columns(source: Any, target: Any, ldo: Any, rows: Any, width: Any, accumulate: Any) -> None:
    """The last panel's columns that exist."""
    for i in range(rows):
        for j in range(width):
            value = load_f32(source + 4 * (i * PANEL + j))
            at = target + 4 * (i * ldo + j)
            if accumulate:
                value = load_f32(at) + value
            store_f32(at, value)
