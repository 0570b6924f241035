"""A small matrix product of bytes: what attention's two products are made of where keys and values are int8.

    sums[r, c] = sum over quads i, bytes j of  a[r, 4i + j] * b[i, c, j]          exactly, in int32

``a``: rows of numbers of 16 bits, as two planes of bytes (a = 256 * high + low), the low one ``low`` bytes behind the
high one; rows are ``lda`` bytes apart. ``b``: for 16 columns a run of 64 bytes, each column four bytes side by side;
``ldb`` bytes from quad to quad, ``skip`` bytes from 16 columns to the next 16. ``out``: float32 rows, ``ldo`` bytes
apart. The two products differ in signs and in what becomes of the sums:

``key_product``      a is signed, b is not (code + 128); ``out[r, c] = (sums[r, c] + start[r]) * scale[c]``
``value_product``    a is not signed, b is;              ``out[r, c] = out[r, c] * factor[r] + sums[r, c] * gain[r]``

``start`` is int32, for each row, and takes the 128 back; ``scale`` float32 for each column; ``factor`` and ``gain``
float32 for each row. Sums must stay below 2**31 in magnitude at their end: they do up to 256 quads of keys and 32 of
values. Since they are exact, nothing depends on the order or on how many rows are computed together; on the two levels
they are the same. A quad is two VPDPBUSD (128 products), or four multiplications with the whole 16 bits.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
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
    all_lanes,
    const,
    dot_u8s8,
    fma,
    incoming,
    load,
    prefetch_line,
    splat,
    store,
    zeros,
)
from ringserve.kernels.cpu.pair_product import INTO_L2


def _byte(b: Any, word: Any, byte: int, signed: bool) -> Any:
    """A byte of each int32, lanes or not, widened."""
    up, down = (all_lanes(bits) if word.type == V16I32 else ir.Constant(I32, bits) for bits in (24 - 8 * byte, 24))
    left = b.shl(word, up)
    return b.ashr(left, down) if signed else b.lshr(left, down)


def _whole(b: Any, high: Any, low: Any, byte: int, signed: bool) -> Any:
    """256 * high + low of one byte of two int32."""
    return b.add(b.shl(_byte(b, high, byte, signed), ir.Constant(I32, 8)), _byte(b, low, byte, signed))


def _make_tile(rows: int, vectors: int, keys: bool) -> Any:
    """``rows`` x ``16 * vectors`` outputs in registers."""

    def tile(
        context: Any,
        level: Any,
        a: Any,
        lda: Any,
        low: Any,
        b_matrix: Any,
        ldb: Any,
        skip: Any,
        quads: Any,
        out: Any,
        ldo: Any,
        first: Any,
        second: Any,
        ahead: Any,
    ) -> Any:
        native = has_avx512(level)

        def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
            _, a, lda, low, b_matrix, ldb, skip, quads, out, ldo, first, second, ahead = args
            a_rows = [b.add(a, b.mul(lda, const(r))) for r in range(rows)]
            out_rows = [b.add(out, b.mul(ldo, const(r))) for r in range(rows)]
            b_columns = [b.add(b_matrix, b.mul(skip, const(v))) for v in range(vectors)]
            outputs = [(r, v) for r in range(rows) for v in range(vectors)]
            if keys:
                by_row = [splat(b, load(b, first, 4 * r, I32), V16I32) for r in range(rows)]
                starts = [by_row[r] for r, _ in outputs]
            else:
                starts = [zeros(V16I32) for _ in outputs]
            before = b.block
            loop, after = b.append_basic_block("quads"), b.append_basic_block("done")
            b.branch(loop)
            b.position_at_end(loop)
            i = b.phi(I64)
            i.add_incoming(const(0), before)
            sums = [b.phi(V16I32) for _ in outputs]
            incoming(sums, starts, before)
            highs = [b.phi(V16I32) for _ in outputs] if native else []
            incoming(highs, [zeros(V16I32) for _ in highs], before)
            b_at, a_at = b.mul(i, ldb), b.mul(i, const(4))
            lines = b.add(ahead, b.mul(i, const(64 * vectors)))
            for v in range(vectors):
                prefetch_line(b, lines, 64 * v, INTO_L2)
            columns = [load(b, b.add(b_columns[v], b_at), 0, V16I32) for v in range(vectors)]
            new_sums: list[Any] = []
            new_highs: list[Any] = []
            for r in range(rows):
                at = b.add(a_rows[r], a_at)
                high, rest = load(b, at, 0, I32), load(b, b.add(at, low), 0, I32)
                if native:
                    pair = [splat(b, word, V16I32) for word in (high, rest)]
                    for v in range(vectors):
                        for kept, new, left in ((highs, new_highs, pair[0]), (sums, new_sums, pair[1])):
                            x, y = (columns[v], left) if keys else (left, columns[v])
                            new.append(dot_u8s8(b, kept[r * vectors + v], x, y, True))
                else:
                    numbers = [splat(b, _whole(b, high, rest, byte, keys), V16I32) for byte in range(4)]
                    for v in range(vectors):
                        total = sums[r * vectors + v]
                        for byte in range(4):
                            total = b.add(total, b.mul(_byte(b, columns[v], byte, not keys), numbers[byte]))
                        new_sums.append(total)
            incoming(sums, new_sums, loop)
            incoming(highs, new_highs, loop)
            following = b.add(i, const(1))
            i.add_incoming(following, loop)
            b.cbranch(b.icmp_signed("<", following, quads), loop, after)
            b.position_at_end(after)
            if keys:
                scales = [load(b, second, 64 * v, V16F32) for v in range(vectors)]
            else:
                factors, gains = (
                    [splat(b, load(b, base, 4 * r, F32), V16F32) for r in range(rows)] for base in (first, second)
                )
            for index, (r, v) in enumerate(outputs):
                total = new_sums[index]
                if native:
                    total = b.add(total, b.shl(new_highs[index], all_lanes(8)))
                value = b.sitofp(total, V16F32)
                if keys:
                    value = b.fmul(value, scales[v])
                else:
                    value = fma(b, value, gains[r], b.fmul(load(b, out_rows[r], 64 * v, V16F32), factors[r]))
                store(b, value, out_rows[r], 64 * v)
            return ctx.get_dummy_value()

        return types.void(level, *[types.int64] * 12), generate

    return intrinsic(tile)


_k1x1, _k2x1, _k3x1 = (_make_tile(rows, 1, True) for rows in (1, 2, 3))
_k1x2, _k2x2, _k3x2 = (_make_tile(rows, 2, True) for rows in (1, 2, 3))
_k1x4, _k2x4, _k3x4 = (_make_tile(rows, 4, True) for rows in (1, 2, 3))
_v1x1, _v2x1, _v3x1 = (_make_tile(rows, 1, False) for rows in (1, 2, 3))
_v1x2, _v2x2, _v3x2 = (_make_tile(rows, 2, False) for rows in (1, 2, 3))
_v1x4, _v2x4, _v3x4 = (_make_tile(rows, 4, False) for rows in (1, 2, 3))


@compiled
def key_product(
    level: Any,
    a: int,
    lda: int,
    low: int,
    b: int,
    ldb: int,
    skip: int,
    quads: int,
    out: int,
    ldo: int,
    start: int,
    scale: int,
    rows: int,
    vectors: int,
    ahead: int,
) -> None:
    """``out`` [rows, 16 * vectors]; see the module. ``ahead``: what to load into L2 meanwhile, 64 * vectors bytes for
    each quad."""
    v = 0
    while v < vectors:
        step = 4 if vectors - v >= 4 else (2 if vectors - v >= 2 else 1)
        bv, ov, scale_v = b + skip * v, out + 64 * v, scale + 64 * v
        r = 0
        while r < rows:
            height = 3 if rows - r == 3 or rows - r > 4 else min(rows - r, 2)  # 4 as 2 + 2
            fetch = ahead + 64 * quads * v if r == 0 else b  # once is enough
            ar, outr, start_r = a + r * lda, ov + r * ldo, start + 4 * r
            if height == 3:
                if step == 4:
                    _k3x4(level, ar, lda, low, bv, ldb, skip, quads, outr, ldo, start_r, scale_v, fetch)
                elif step == 2:
                    _k3x2(level, ar, lda, low, bv, ldb, skip, quads, outr, ldo, start_r, scale_v, fetch)
                else:
                    _k3x1(level, ar, lda, low, bv, ldb, skip, quads, outr, ldo, start_r, scale_v, fetch)
            elif height == 2:
                if step == 4:
                    _k2x4(level, ar, lda, low, bv, ldb, skip, quads, outr, ldo, start_r, scale_v, fetch)
                elif step == 2:
                    _k2x2(level, ar, lda, low, bv, ldb, skip, quads, outr, ldo, start_r, scale_v, fetch)
                else:
                    _k2x1(level, ar, lda, low, bv, ldb, skip, quads, outr, ldo, start_r, scale_v, fetch)
            else:
                if step == 4:
                    _k1x4(level, ar, lda, low, bv, ldb, skip, quads, outr, ldo, start_r, scale_v, fetch)
                elif step == 2:
                    _k1x2(level, ar, lda, low, bv, ldb, skip, quads, outr, ldo, start_r, scale_v, fetch)
                else:
                    _k1x1(level, ar, lda, low, bv, ldb, skip, quads, outr, ldo, start_r, scale_v, fetch)
            r += height
        v += step


@compiled
def value_product(
    level: Any,
    a: int,
    lda: int,
    low: int,
    b: int,
    ldb: int,
    skip: int,
    quads: int,
    out: int,
    ldo: int,
    factor: int,
    gain: int,
    rows: int,
    vectors: int,
    ahead: int,
) -> None:
    """``out`` [rows, 16 * vectors]; see the module, and ``key_product``."""
    v = 0
    while v < vectors:
        step = 4 if vectors - v >= 4 else (2 if vectors - v >= 2 else 1)
        bv, ov = b + skip * v, out + 64 * v
        r = 0
        while r < rows:
            height = 3 if rows - r == 3 or rows - r > 4 else min(rows - r, 2)
            fetch = ahead + 64 * quads * v if r == 0 else b
            ar, outr, factor_r, gain_r = a + r * lda, ov + r * ldo, factor + 4 * r, gain + 4 * r
            if height == 3:
                if step == 4:
                    _v3x4(level, ar, lda, low, bv, ldb, skip, quads, outr, ldo, factor_r, gain_r, fetch)
                elif step == 2:
                    _v3x2(level, ar, lda, low, bv, ldb, skip, quads, outr, ldo, factor_r, gain_r, fetch)
                else:
                    _v3x1(level, ar, lda, low, bv, ldb, skip, quads, outr, ldo, factor_r, gain_r, fetch)
            elif height == 2:
                if step == 4:
                    _v2x4(level, ar, lda, low, bv, ldb, skip, quads, outr, ldo, factor_r, gain_r, fetch)
                elif step == 2:
                    _v2x2(level, ar, lda, low, bv, ldb, skip, quads, outr, ldo, factor_r, gain_r, fetch)
                else:
                    _v2x1(level, ar, lda, low, bv, ldb, skip, quads, outr, ldo, factor_r, gain_r, fetch)
            else:
                if step == 4:
                    _v1x4(level, ar, lda, low, bv, ldb, skip, quads, outr, ldo, factor_r, gain_r, fetch)
                elif step == 2:
                    _v1x2(level, ar, lda, low, bv, ldb, skip, quads, outr, ldo, factor_r, gain_r, fetch)
                else:
                    _v1x1(level, ar, lda, low, bv, ldb, skip, quads, outr, ldo, factor_r, gain_r, fetch)
            r += height
        v += step
