"""A small matrix product of bfloat16 pairs: what attention's two products are made of.

    out[r, c] = start[r, c] + sum over pairs i of  a[r, 2i] * b[i, c, 0] + a[r, 2i + 1] * b[i, c, 1]

``a``: rows of bfloat16, ``lda`` bytes apart. ``b``: for 16 columns a run of 64 bytes, each column two bfloat16 side by
side; ``ldb`` bytes from pair to pair, ``skip`` bytes from 16 columns to the next 16. ``out``: float32
rows, ``ldo`` bytes apart. ``start`` is zero, or ``out * factor[r]`` (a float32 for each row).

An element is one chain of additions over the pairs, in their order, whatever the rows and columns around it: it does
not depend on how many rows are computed together. A pair is one VDPBF16PS (32 products) or, on the portable level, two
multiply-adds; the two levels round differently.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from ringserve.kernels.cpu.compiled import compiled
from ringserve.kernels.cpu.features import has_avx512
from ringserve.kernels.cpu.llvm import (
    F32,
    I32,
    I64,
    V16F32,
    V16I32,
    const,
    dot_bf16,
    load,
    prefetch_line,
    splat,
    store,
    zeros,
)

INTO_L2 = 2
"""How near ``ahead`` is fetched: many more lines can be under way to L2 than to L1."""


def _make_tile(rows: int, vectors: int, scaled: bool) -> Any:
    """``rows`` x ``16 * vectors`` outputs in registers."""

    def tile(
        context: Any,
        level: Any,
        a: Any,
        lda: Any,
        b_matrix: Any,
        ldb: Any,
        next_columns: Any,
        pairs: Any,
        out: Any,
        ldo: Any,
        factor: Any,
        ahead: Any,
    ) -> Any:
        native = has_avx512(level)

        def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
            _, a, lda, b_matrix, ldb, next_columns, pairs, out, ldo, factor, ahead = args
            a_rows = [b.add(a, b.mul(lda, const(r))) for r in range(rows)]
            out_rows = [b.add(out, b.mul(ldo, const(r))) for r in range(rows)]
            b_columns = [b.add(b_matrix, b.mul(next_columns, const(v))) for v in range(vectors)]
            starts = []
            for r in range(rows):
                for v in range(vectors):
                    if scaled:
                        by = splat(b, load(b, factor, 4 * r, F32), V16F32)
                        starts.append(b.fmul(load(b, out_rows[r], 64 * v, V16F32), by))
                    else:
                        starts.append(zeros(V16F32))
            before = b.block
            loop, after = b.append_basic_block("pairs"), b.append_basic_block("done")
            b.branch(loop)
            b.position_at_end(loop)
            i = b.phi(I64)
            i.add_incoming(const(0), before)
            totals = [b.phi(V16F32) for _ in starts]
            for phi, start in zip(totals, starts, strict=True):
                phi.add_incoming(start, before)
            b_at, a_at = b.mul(i, ldb), b.mul(i, const(4))
            lines = b.add(ahead, b.mul(i, const(64 * vectors)))
            for v in range(vectors):
                prefetch_line(b, lines, 64 * v, INTO_L2)
            columns = [load(b, b.add(b_columns[v], b_at), 0, V16I32) for v in range(vectors)]
            results = []
            for r in range(rows):
                left = splat(b, load(b, b.add(a_rows[r], a_at), 0, I32), V16I32)
                for v in range(vectors):
                    results.append(dot_bf16(b, totals[r * vectors + v], left, columns[v], native))
            for phi, result in zip(totals, results, strict=True):
                phi.add_incoming(result, loop)
            following = b.add(i, const(1))
            i.add_incoming(following, loop)
            b.cbranch(b.icmp_signed("<", following, pairs), loop, after)
            b.position_at_end(after)
            for r in range(rows):
                for v in range(vectors):
                    store(b, results[r * vectors + v], out_rows[r], 64 * v)
            return ctx.get_dummy_value()

        return types.void(level, *[types.int64] * 10), generate

    return intrinsic(tile)


_1x1, _2x1, _3x1, _6x1 = (_make_tile(rows, 1, False) for rows in (1, 2, 3, 6))
_1x2, _2x2, _3x2, _6x2 = (_make_tile(rows, 2, False) for rows in (1, 2, 3, 6))
_1x4, _2x4, _3x4, _6x4 = (_make_tile(rows, 4, False) for rows in (1, 2, 3, 6))
_s1x1, _s2x1, _s3x1, _s6x1 = (_make_tile(rows, 1, True) for rows in (1, 2, 3, 6))
_s1x2, _s2x2, _s3x2, _s6x2 = (_make_tile(rows, 2, True) for rows in (1, 2, 3, 6))
_s1x4, _s2x4, _s3x4, _s6x4 = (_make_tile(rows, 4, True) for rows in (1, 2, 3, 6))


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
    rows: int,
    vectors: int,
    ahead: int,
) -> None:
    """``out`` [rows, 16 * vectors] = a @ b; ``pairs`` >= 1. ``ahead``: what to load into L2 meanwhile, 64 * vectors
    bytes for each pair."""
    v = 0
    while v < vectors:
        step = 4 if vectors - v >= 4 else (2 if vectors - v >= 2 else 1)
        bv, ov = b + skip * v, out + 64 * v
        r = 0
        while r < rows:
            left = rows - r
            fetch = ahead + 64 * pairs * v if r == 0 else b  # once is enough
            ar, outr = a + r * lda, ov + r * ldo
            if left >= 6:
                if step == 4:
                    _6x4(level, ar, lda, bv, ldb, skip, pairs, outr, ldo, 0, fetch)
                elif step == 2:
                    _6x2(level, ar, lda, bv, ldb, skip, pairs, outr, ldo, 0, fetch)
                else:
                    _6x1(level, ar, lda, bv, ldb, skip, pairs, outr, ldo, 0, fetch)
                r += 6
            elif left >= 3:
                if step == 4:
                    _3x4(level, ar, lda, bv, ldb, skip, pairs, outr, ldo, 0, fetch)
                elif step == 2:
                    _3x2(level, ar, lda, bv, ldb, skip, pairs, outr, ldo, 0, fetch)
                else:
                    _3x1(level, ar, lda, bv, ldb, skip, pairs, outr, ldo, 0, fetch)
                r += 3
            elif left == 2:
                if step == 4:
                    _2x4(level, ar, lda, bv, ldb, skip, pairs, outr, ldo, 0, fetch)
                elif step == 2:
                    _2x2(level, ar, lda, bv, ldb, skip, pairs, outr, ldo, 0, fetch)
                else:
                    _2x1(level, ar, lda, bv, ldb, skip, pairs, outr, ldo, 0, fetch)
                r += 2
            else:
                if step == 4:
                    _1x4(level, ar, lda, bv, ldb, skip, pairs, outr, ldo, 0, fetch)
                elif step == 2:
                    _1x2(level, ar, lda, bv, ldb, skip, pairs, outr, ldo, 0, fetch)
                else:
                    _1x1(level, ar, lda, bv, ldb, skip, pairs, outr, ldo, 0, fetch)
                r += 1
        v += step


@compiled
def pair_product_add(
    level: Any,
    a: int,
    lda: int,
    b: int,
    ldb: int,
    skip: int,
    pairs: int,
    out: int,
    ldo: int,
    factor: int,
    rows: int,
    vectors: int,
    ahead: int,
) -> None:
    """``out`` [rows, 16 * vectors] = out * factor [rows, 1] + a @ b; otherwise as ``pair_product``."""
    v = 0
    while v < vectors:
        step = 4 if vectors - v >= 4 else (2 if vectors - v >= 2 else 1)
        bv, ov = b + skip * v, out + 64 * v
        r = 0
        while r < rows:
            left = rows - r
            fetch = ahead + 64 * pairs * v if r == 0 else b  # once is enough
            ar, outr, fr = a + r * lda, ov + r * ldo, factor + 4 * r
            if left >= 6:
                if step == 4:
                    _s6x4(level, ar, lda, bv, ldb, skip, pairs, outr, ldo, fr, fetch)
                elif step == 2:
                    _s6x2(level, ar, lda, bv, ldb, skip, pairs, outr, ldo, fr, fetch)
                else:
                    _s6x1(level, ar, lda, bv, ldb, skip, pairs, outr, ldo, fr, fetch)
                r += 6
            elif left >= 3:
                if step == 4:
                    _s3x4(level, ar, lda, bv, ldb, skip, pairs, outr, ldo, fr, fetch)
                elif step == 2:
                    _s3x2(level, ar, lda, bv, ldb, skip, pairs, outr, ldo, fr, fetch)
                else:
                    _s3x1(level, ar, lda, bv, ldb, skip, pairs, outr, ldo, fr, fetch)
                r += 3
            elif left == 2:
                if step == 4:
                    _s2x4(level, ar, lda, bv, ldb, skip, pairs, outr, ldo, fr, fetch)
                elif step == 2:
                    _s2x2(level, ar, lda, bv, ldb, skip, pairs, outr, ldo, fr, fetch)
                else:
                    _s2x1(level, ar, lda, bv, ldb, skip, pairs, outr, ldo, fr, fetch)
                r += 2
            else:
                if step == 4:
                    _s1x4(level, ar, lda, bv, ldb, skip, pairs, outr, ldo, fr, fetch)
                elif step == 2:
                    _s1x2(level, ar, lda, bv, ldb, skip, pairs, outr, ldo, fr, fetch)
                else:
                    _s1x1(level, ar, lda, bv, ldb, skip, pairs, outr, ldo, fr, fetch)
                r += 1
        v += step
