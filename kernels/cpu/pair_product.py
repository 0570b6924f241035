"""A small matrix product of bfloat16 pairs: what attention's two products are made of.

    out[r, c] = start[r, c] + sum over pairs i of  a[r, 2i] * b[i, c, 0] + a[r, 2i + 1] * b[i, c, 1]

``a``: rows of bfloat16, ``lda`` bytes apart. ``b``: for 16 columns a run of 64 bytes, each column two bfloat16 side by
side; ``ldb`` bytes from pair to pair, ``skip`` bytes from 16 columns to the next 16. ``out``: float32 rows, ``ldo``
bytes apart. ``start`` is zero or, where a ``factor`` is given (a float32 for each row), ``out * factor[r]``.

An element is one chain of additions over the pairs, in their order, whatever the rows and columns around it: it does
not depend on how many rows are computed together. A pair is one VDPBF16PS (32 products) or, on the portable level, two
multiply-adds; the two levels round differently.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ringserve.kernels.cpu.compiled import compiled
from ringserve.kernels.cpu.features import has_avx512
from ringserve.kernels.cpu.llvm import F32, V16F32, V16I32, const, dot_bf16, load, loop, splat, store, zeros
from ringserve.kernels.cpu.product_tiles import addresses, emit_tiles, load_columns, load_number, next_width

HEIGHTS = (1, 2, 3, 6)


@intrinsic
def _tile(context: Any, level: Any, height: Any, width: Any, factor: Any, numbers: Any) -> Any:
    """``height`` x ``16 * width`` outputs in registers, from row ``row`` on:

    ``_tile(level, height, width, factor, (row, a, lda, b, ldb, skip, pairs, out, ldo, ahead))``
    """
    native = has_avx512(level)

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        _, height, width, by, numbers = args
        by, values = None if factor == types.none else by, cgutils.unpack_tuple(b, numbers)
        emit_tiles(b, height, width, HEIGHTS, lambda rows, vectors: _emit_tile(b, rows, vectors, native, by, *values))
        return ctx.get_dummy_value()

    return types.void(level, types.int64, types.int64, factor, types.UniTuple(types.int64, len(numbers))), generate


def _emit_tile(
    b: Any, rows: int, vectors: int, native: bool, factor: Any, row: Any, a: Any, lda: Any, b_matrix: Any, *rest: Any
) -> None:
    ldb, skip, pairs, out, ldo, ahead = rest
    a_rows = addresses(b, b.add(a, b.mul(row, lda)), lda, rows)
    out_rows = addresses(b, b.add(out, b.mul(row, ldo)), ldo, rows)
    b_columns = addresses(b, b_matrix, skip, vectors)
    outputs = [(r, v) for r in range(rows) for v in range(vectors)]
    starts = [zeros(V16F32) for _ in outputs]
    if factor is not None:
        of_row = b.add(factor, b.mul(row, const(4)))
        factors = [splat(b, load(b, of_row, 4 * r, F32), V16F32) for r in range(rows)]
        starts = [b.fmul(load(b, out_rows[r], 64 * v, V16F32), factors[r]) for r, v in outputs]

    def add_pair(i: Any, totals: list[Any]) -> list[Any]:
        columns = load_columns(b, b_columns, ldb, i, ahead)
        new = []
        for r in range(rows):
            left = splat(b, load_number(b, a_rows[r], i), V16I32)
            new += [dot_bf16(b, totals[r * vectors + v], left, columns[v], native) for v in range(vectors)]
        return new

    for (r, v), total in zip(outputs, loop(b, pairs, starts, add_pair), strict=True):
        store(b, total, out_rows[r], 64 * v)


@compiled
def pair_product(
    level: Any,
    a: int,
    lda: int,
    b: int,
    ldb: int,
    skip: int,
    pairs: int,
    out: int,
    ldo: int,
    factor: int | None,
    rows: int,
    vectors: int,
    ahead: int,
) -> None:
    """``out`` [rows, 16 * vectors] = a @ b or, with a ``factor`` [rows, 1], out * factor + a @ b; ``pairs`` >= 1.
    ``ahead``: what to load into L2 meanwhile, 64 * vectors bytes for each pair."""
    v = 0
    while v < vectors:
        width = next_width(vectors - v)
        r = 0
        while r < rows:
            height = 6 if rows - r >= 6 else min(rows - r, 3)
            fetch = ahead + 64 * pairs * v if r == 0 else b  # once is enough
            numbers = r, a, lda, b + skip * v, ldb, skip, pairs, out + 64 * v, ldo, fetch
            _tile(level, height, width, factor, numbers)
            r += height
        v += width
