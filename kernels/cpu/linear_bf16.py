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
  should not be a multiple of 4096: rows would fight for the same cache sets (155 instead of 233 GFLOP/s at k = 4096);
* ``out``: address of float32 ``[m, ldo]``; columns ``48 * panel_first .. min(n, 48 * panel_last)`` are written: nothing
  beyond column n is;
* ``accumulate``: 0 writes, 1 adds to what is there (a residual): ``out + (sum + bias)``.

The additions along K have one fixed order: a row's result is the same, bit for bit, whatever m, its place in x and the
panels computed together are. VDPBF16PS treats denormals as zero and rounds to nearest.
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
from ringserve.kernels.cpu.llvm import I32, I64, V16F32, V16I32, load_f32, store_f32

VECTORS = 3
PANEL = 16 * VECTORS
K_UNIT = 8
ROWS = 8
"""Rows of the largest register tile: 8 x 3 vectors of sums."""

_UNROLL = K_UNIT // 2
TURN_BYTES = 64 * VECTORS * _UNROLL
AHEAD_LINES = 6
"""Prefetched in a turn: the share of two passes; with more passes some are asked for twice, which costs nothing."""
AHEAD_LEVEL = 2
"""Into L2: fetches into L1 have too few buffers to keep up with memory (measured: 178 against 215 GFLOP/s)."""


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


def pack_bf16(weight: NDArray[np.uint16], zeros: Zeros = aligned_zeros) -> NDArray[np.uint16]:
    """bfloat16 ``[n, k]`` (as uint16) to panels ``[n_pad / 48, k_pad / 2, 48, 2]``, in memory from ``zeros``."""
    n, k = weight.shape
    packed = zeros((padded(n) // PANEL, padded_k(k) // 2, PANEL, 2), np.uint16)
    for panel, first in zip(packed, range(0, n, PANEL), strict=True):
        rows = weight[first : first + PANEL]
        columns = np.zeros((PANEL, padded_k(k)), np.uint16)
        columns[: len(rows), :k] = rows
        panel[...] = columns.reshape(PANEL, -1, 2).transpose(1, 0, 2)
    return packed


@intrinsic
def _tile(context: Any, level: Any, rows: Any, numbers: Any) -> Any:
    """The register tile for 1 to ``ROWS`` rows and one panel. Addresses, and strides in bytes:

    ``_tile(level, rows, (w, bias, x, ldx, pairs, out, ldo, accumulate, ahead, ahead_step))``
    """
    native = has_avx512(level)

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        values = cgutils.unpack_tuple(b, args[2])
        llvm.switch(b, args[1], range(1, ROWS + 1), lambda rows: _emit_tile(b, rows, native, *values))
        return ctx.get_dummy_value()

    return types.void(level, types.int64, types.UniTuple(types.int64, len(numbers))), gen


def _emit_tile(
    b: Any, rows: int, native: bool, w: Any, bias: Any, x: Any, ldx: Any, pairs: Any, out: Any, ldo: Any, *rest: Any
) -> None:
    accumulate, ahead, ahead_step = rest
    const = llvm.const
    starts = llvm.row_addresses(b, x, ldx, rows)
    end = b.add(w, b.mul(pairs, const(64 * VECTORS)))
    before, loop, done = b.block, b.append_basic_block("pairs"), b.append_basic_block("sums")
    b.branch(loop)

    b.position_at_end(loop)
    at, offset, ahead_at = b.phi(I64), b.phi(I64), b.phi(I64)
    sums = [[b.phi(V16F32) for _ in range(VECTORS)] for _ in range(rows)]
    new = [list(row) for row in sums]
    row_at = [llvm.row_address(b, starts, ldx, row, offset) for row in range(rows)]
    for step in range(_UNROLL):
        vectors = [llvm.load(b, at, 64 * (VECTORS * step + j), V16I32, 64) for j in range(VECTORS)]
        for row in range(rows):
            pair = llvm.splat(b, llvm.load(b, row_at[row], 4 * step, I32), V16I32)
            for j in range(VECTORS):
                new[row][j] = llvm.dot_bf16(b, new[row][j], pair, vectors[j], native)
    if rows > ROWS // 2:
        for line in range(AHEAD_LINES):
            llvm.prefetch_line(b, ahead_at, 64 * line, AHEAD_LEVEL)
    next_at, next_offset = b.add(at, const(64 * VECTORS * _UNROLL)), b.add(offset, const(4 * _UNROLL))
    llvm.incoming([at, offset, ahead_at], [w, const(0), ahead], before)
    llvm.incoming([at, offset, ahead_at], [next_at, next_offset, b.add(ahead_at, ahead_step)], loop)
    for row in range(rows):
        llvm.incoming(sums[row], [llvm.zeros(V16F32)] * VECTORS, before)
        llvm.incoming(sums[row], new[row], loop)
    b.cbranch(b.icmp_unsigned("<", next_at, end), loop, done)

    b.position_at_end(done)
    biases = [llvm.load(b, bias, 64 * j, V16F32) for j in range(VECTORS)]
    new = [[b.fadd(new[row][j], biases[j]) for j in range(VECTORS)] for row in range(rows)]
    llvm.store_tile(b, new, out, ldo, accumulate)


@compiled
def bf16_block(
    level: Level,
    w: int,
    bias: int,
    x: int,
    ldx: int,
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
    panel_bytes = 2 * k_pad * PANEL
    step = ahead_step(tiles)
    scratch = llvm.stack_floats_384()
    for panel in range(panel_first, panel_last):
        w_panel = w + panel * panel_bytes
        column = panel * PANEL
        b_panel = bias + 4 * column
        width = min(PANEL, n - column)
        row = 0
        for tile in range(tiles):
            # Tiles of nearly equal height: a last tile of one row would cost as much as one of four.
            rows = m // tiles + (1 if tile < m % tiles else 0)
            target, stride, add = out + (row * ldo + column) * 4, ldo * 4, accumulate
            if width < PANEL:
                target, stride, add = scratch, PANEL * 4, 0
            numbers = (
                w_panel,
                b_panel,
                x + row * ldx * 2,
                ldx * 2,
                k_pad // 2,
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


@compiled
def ahead_step(tiles: int) -> int:
    """Bytes of the next panel to prefetch in a turn of the tile's loop, which consumes ``TURN_BYTES`` of this one.

    While several tiles pass over a panel, the next one is fetched from memory into the caches, a share in each pass.
    """
    return TURN_BYTES // min(max(tiles, 1), 4)


@compiled
def ahead_address(tiles: int, tile: int, panel: int, panel_bytes: int) -> int:
    """Where a tile begins to prefetch; the panel itself (a harmless repetition) where there is nothing to do."""
    passes = min(tiles, 4)
    return panel + panel_bytes + tile * (panel_bytes // passes) if tiles > 1 and tile < passes else panel


@compiled
def copy_columns(source: int, target: int, ldo: int, rows: int, width: int, accumulate: int) -> None:
    """The last panel's columns that exist."""
    for i in range(rows):
        for j in range(width):
            value = load_f32(source + 4 * (i * PANEL + j))
            at = target + 4 * (i * ldo + j)
            if accumulate:
                value = load_f32(at) + value
            store_f32(at, value)
