"""What attention over pages of either type (``paged_attention``, ``paged_attention_int8``) is given, and what it asks
of that: which pages a span has, which keys a row sees, its largest score.

The classes are numba's named tuples too: compiled code makes them and takes them apart, nothing is left of them.
Functions are inlined whatever LLVM thinks of it: as calls they cost attention with many rows two per cent.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba.extending import register_jitable

from ringserve.kernels.cpu.attention_spans import LOWEST, SPAN, first_page
from ringserve.kernels.cpu.compiled import compiled
from ringserve.kernels.cpu.vector import broadcast, keep_between, largest_lane, maximum
from ringserve.kernels.cpu.vector_memory import load, prefetch_l2, store

MAX_ROWS = 64
"""Query rows (tokens x heads of a kv head) of one call."""


class QueryRows(NamedTuple):
    """Rows of one kv head: ``group`` heads of the token at ``position``, then of the next one."""

    queries: int
    """Address of bfloat16 [num_rows, dim], contiguous."""
    num_rows: int
    """At most ``MAX_ROWS``."""
    group: int
    position: int
    window: int
    """0 for none."""
    scale: Any
    """float32 > 0, of the scores; includes log2(e)."""


class Pages(NamedTuple):
    """A sequence's pages of one kv head in bfloat16 (``kv_pages`` has their layout)."""

    keys: int
    """Address of the head in page 0 of an array [pages, kv_heads, size, ...]."""
    values: int
    table: int
    """Address of int32: which page holds the sequence's tokens from i * size on. The entry after the last one that is
    needed may be looked at."""
    kv_heads: int
    size: int
    """Tokens of a page."""
    dim: int


class Int8Pages(NamedTuple):
    """The same in int8 with scales (``kv_pages_int8``)."""

    keys: int
    values: int
    key_scales: int
    value_scales: int
    table: int
    kv_heads: int
    size: int
    dim: int


@register_jitable(forceinline=True)
def last_position(rows: QueryRows) -> int:
    """Of the rows' tokens."""
    return rows.position + (rows.num_rows - 1) // rows.group


@register_jitable(forceinline=True)
def span_bounds(rows: QueryRows, page_size: int, span: int) -> tuple[int, int]:
    """The first page of a span that some row sees, and the last position."""
    first = max(first_page(rows.position, rows.window, page_size), span * SPAN // page_size)
    return first, min(last_position(rows), (span + 1) * SPAN - 1)


@register_jitable(forceinline=True)
def keys_seen(rows: QueryRows, row: int, base: int) -> tuple[int, int]:
    """[first, last) of the keys that a row sees, counted from position ``base``; they may lie beyond its page."""
    position = rows.position + row // rows.group
    return position - rows.window + 1 - base if rows.window > 0 else 0, position + 1 - base


@register_jitable(forceinline=True)
def largest_score(scores: int, vectors: int, first: int, last: int) -> Any:
    """Of a row's ``16 * vectors`` scores of a page, at least ``LOWEST``; those outside [first, last) become -inf."""
    top = broadcast(np.float32(LOWEST))
    if first > 0 or last < 16 * vectors:
        for v in range(vectors):
            s = keep_between(load(scores + 64 * v), 16 * v, first, last)
            store(scores + 64 * v, s)
            top = maximum(s, top)
    else:
        for v in range(vectors):
            top = maximum(load(scores + 64 * v), top)
    return largest_lane(top)


@compiled
def fetch_lines(start: int, size: int) -> None:
    """Ask for so many bytes, into L2."""
    for line in range(0, size, 64):
        prefetch_l2(start + line)
