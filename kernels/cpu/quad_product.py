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
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

from ringserve.kernels.cpu.compiled import compiled
from ringserve.kernels.cpu.features import has_avx512
from ringserve.kernels.cpu.llvm import (
    F32,
    I32,
    V16F32,
    V16I32,
    all_lanes,
    dot_u8s8,
    fma,
    load,
    loop,
    splat,
    store,
    zeros,
)
from ringserve.kernels.cpu.product_tiles import addresses, emit_tiles, load_columns, load_number, next_width

HEIGHTS = (1, 2, 3)


def _byte(b: Any, word: Any, byte: int, signed: bool) -> Any:
    """A byte of each int32, lanes or not, widened."""
    up, down = (all_lanes(bits) if word.type == V16I32 else ir.Constant(I32, bits) for bits in (24 - 8 * byte, 24))
    left = b.shl(word, up)
    return b.ashr(left, down) if signed else b.lshr(left, down)


def _whole(b: Any, high: Any, low: Any, byte: int, signed: bool) -> Any:
    """256 * high + low of one byte of two int32."""
    return b.add(b.shl(_byte(b, high, byte, signed), ir.Constant(I32, 8)), _byte(b, low, byte, signed))


def _make_tile(keys: bool) -> Any:
    """``height`` x ``16 * width`` outputs in registers:

    ``tile(level, height, width, (a, lda, low, b, ldb, skip, quads, out, ldo, first, second, ahead))``

    ``first``, ``second``: ``start`` and ``scale``, or ``factor`` and ``gain``.
    """

    def tile(context: Any, level: Any, height: Any, width: Any, numbers: Any) -> Any:
        native = has_avx512(level)

        def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
            _, height, width, numbers = args
            values = cgutils.unpack_tuple(b, numbers)
            emit_tiles(b, height, width, HEIGHTS, lambda *size: _emit_tile(b, *size, native, keys, *values))
            return ctx.get_dummy_value()

        return types.void(level, types.int64, types.int64, types.UniTuple(types.int64, len(numbers))), generate

    return intrinsic(tile)


def _emit_tile(
    b: Any, rows: int, vectors: int, native: bool, keys: bool, a: Any, lda: Any, low: Any, b_matrix: Any, *rest: Any
) -> None:
    ldb, skip, quads, out, ldo, first, second, ahead = rest
    a_rows, out_rows = addresses(b, a, lda, rows), addresses(b, out, ldo, rows)
    b_columns = addresses(b, b_matrix, skip, vectors)
    outputs = [(r, v) for r in range(rows) for v in range(vectors)]
    starts = [zeros(V16I32) for _ in outputs]
    highs = list(starts) if native else []
    if keys:
        by_row = [splat(b, load(b, first, 4 * r, I32), V16I32) for r in range(rows)]
        starts = [by_row[r] for r, _ in outputs]

    def add_quad(i: Any, values: list[Any]) -> list[Any]:
        sums, highs = values[: len(outputs)], values[len(outputs) :]
        columns = load_columns(b, b_columns, ldb, i, ahead)
        new_sums: list[Any] = []
        new_highs: list[Any] = []
        for r in range(rows):
            high, rest = load_number(b, a_rows[r], i), load_number(b, a_rows[r], i, low)
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
        return new_sums + new_highs

    results = loop(b, quads, starts + highs, add_quad)
    if keys:
        scales = [load(b, second, 64 * v, V16F32) for v in range(vectors)]
    else:
        factors, gains = (
            [splat(b, load(b, base, 4 * r, F32), V16F32) for r in range(rows)] for base in (first, second)
        )
    for index, (r, v) in enumerate(outputs):
        total = results[index]
        if native:
            total = b.add(total, b.shl(results[len(outputs) + index], all_lanes(8)))
        value = b.sitofp(total, V16F32)
        if keys:
            value = b.fmul(value, scales[v])
        else:
            value = fma(b, value, gains[r], b.fmul(load(b, out_rows[r], 64 * v, V16F32), factors[r]))
        store(b, value, out_rows[r], 64 * v)


_key_tile, _value_tile = _make_tile(True), _make_tile(False)


@register_jitable
def _next_height(rows: Any) -> Any:
    return 3 if rows == 3 or rows > 4 else min(rows, 2)  # 4 as 2 + 2


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
        width = next_width(vectors - v)
        r = 0
        while r < rows:
            height = _next_height(rows - r)
            fetch = ahead + 64 * quads * v if r == 0 else b  # once is enough
            ar, bv, at = a + r * lda, b + skip * v, out + r * ldo + 64 * v
            numbers = ar, lda, low, bv, ldb, skip, quads, at, ldo, start + 4 * r, scale + 64 * v, fetch
            _key_tile(level, height, width, numbers)
            r += height
        v += width


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
        width = next_width(vectors - v)
        r = 0
        while r < rows:
            height = _next_height(rows - r)
            fetch = ahead + 64 * quads * v if r == 0 else b
            ar, bv, at = a + r * lda, b + skip * v, out + r * ldo + 64 * v
            numbers = ar, lda, low, bv, ldb, skip, quads, at, ldo, factor + 4 * r, gain + 4 * r, fetch
            _value_tile(level, height, width, numbers)
            r += height
        v += width
