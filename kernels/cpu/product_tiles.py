"""How attention's small products (``pair_product``, ``quad_product``) are cut into tiles of registers, and how a tile
reads: rows of a left matrix, one number of 32 bits (some elements side by side) after the other, and 16 columns of a
right one as runs of 64 bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numba.extending import register_jitable

from ringserve.kernels.cpu.llvm import I32, V16I32, const, load, prefetch_line, switch

WIDTHS = (1, 2, 4)
"""Vectors of 16 columns in a tile."""
INTO_L2 = 2
"""How near what comes next is fetched: many more lines can be under way to L2 than to L1."""


@register_jitable
def next_width(vectors: Any) -> Any:
    """Vectors of the next tile, where so many are left."""
    return 4 if vectors >= 4 else (2 if vectors >= 2 else 1)


def emit_tiles(b: Any, height: Any, width: Any, heights: Sequence[int], emit: Callable[[int, int], None]) -> None:
    """``emit(rows, vectors)`` a tile of each size; run the one of ``height`` and ``width`` (int64)."""
    switch(b, height, heights, lambda rows: switch(b, width, WIDTHS, lambda vectors: emit(rows, vectors)))


def addresses(b: Any, base: Any, stride: Any, count: int) -> list[Any]:
    """Of ``count`` rows or columns, ``stride`` bytes apart."""
    return [b.add(base, b.mul(stride, const(i))) for i in range(count)]


def load_columns(b: Any, columns: list[Any], ldb: Any, i: Any, ahead: Any) -> list[Any]:
    """Turn ``i`` of a tile: a vector of each 16 columns. As many lines are asked for from ``ahead`` on."""
    offset, lines = b.mul(i, ldb), b.add(ahead, b.mul(i, const(64 * len(columns))))
    for v in range(len(columns)):
        prefetch_line(b, lines, 64 * v, INTO_L2)
    return [load(b, b.add(column, offset), 0, V16I32) for column in columns]


def load_number(b: Any, row: Any, i: Any, offset: Any = 0) -> Any:
    """Turn ``i`` of a tile: a row's 32 bits."""
    return load(b, b.add(row, b.mul(i, const(4))), offset, I32)
