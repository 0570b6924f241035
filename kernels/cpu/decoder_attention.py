"""A decoder's attention: ROTATE, ATTEND and MERGE of ``decoder``, tile by tile."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba.extending import register_jitable

from ringserve.kernels.cpu.attention_inputs import Int8Pages, Pages, QueryRows, fetch_lines
from ringserve.kernels.cpu.attention_spans import SPAN, first_page, merge_states, normalise, state_bytes
from ringserve.kernels.cpu.compiled import compiled
from ringserve.kernels.cpu.decoder_fields import (
    COS,
    FACTORS,
    FLOAT32,
    FORMAT,
    HEAD_DIM,
    HEADS,
    INPUT,
    INT8,
    K_NORM,
    KEY_SCALES,
    KEYS,
    KV_HEADS,
    LD_INPUT,
    LD_OUTPUT,
    LD_QUERIES,
    LD_SCALES,
    NUM_SEGMENTS,
    OUTPUT,
    PAGE_SIZE,
    Q_NORM,
    QUERIES,
    SCALES,
    SEGMENTS,
    SIN,
    SINGLE,
    SPANS,
    STATES,
    THREADS,
    VALUE_SCALES,
    VALUES,
    WHOLE_SEGMENTS,
    WINDOW,
)
from ringserve.kernels.cpu.kv_pages import write_key, write_value
from ringserve.kernels.cpu.kv_pages_int8 import write_key_int8, write_value_int8
from ringserve.kernels.cpu.llvm import load_i32, load_i64
from ringserve.kernels.cpu.norm import rms_norm
from ringserve.kernels.cpu.paged_attention import attend, attend_span
from ringserve.kernels.cpu.paged_attention_int8 import attend_int8, attend_span_int8, split_queries
from ringserve.kernels.cpu.quantize import GROUP as INT8_GROUP
from ringserve.kernels.cpu.quantize import SCALE_WORDS, quantize_row
from ringserve.kernels.cpu.rope import rotate
from ringserve.kernels.cpu.vector_memory import load, store, store_bfloat16


class _Segment(NamedTuple):
    """Some tokens of one sequence in a step (``decoder_fields``)."""

    token: int
    """The first one's row."""
    position: int
    num_tokens: int
    table: int
    """Address of the sequence's page numbers, int32."""


@register_jitable
def _read_segment(at: int) -> _Segment:
    return _Segment(load_i64(at), load_i64(at + 8), load_i64(at + 16), load_i64(at + 24))


@register_jitable
def _query_rows(op: Any, sizes: Any, segment: _Segment, kv_head: int, scale: Any) -> QueryRows:
    group = sizes[HEADS] // sizes[KV_HEADS]
    queries = op[QUERIES] + 2 * sizes[HEAD_DIM] * group * (kv_head * sizes[LD_QUERIES] + segment.token)
    return QueryRows(queries, segment.num_tokens * group, group, segment.position, op[WINDOW], scale)


@register_jitable
def _pages(op: Any, sizes: Any, table: int, kv_head: int) -> Pages:
    kv_heads, page_size, dim = sizes[KV_HEADS], sizes[PAGE_SIZE], sizes[HEAD_DIM]
    first = 2 * dim * page_size * kv_head
    return Pages(op[KEYS] + first, op[VALUES] + first, table, kv_heads, page_size, dim)


@register_jitable
def _int8_pages(op: Any, sizes: Any, table: int, kv_head: int) -> Int8Pages:
    kv_heads, page_size, dim = sizes[KV_HEADS], sizes[PAGE_SIZE], sizes[HEAD_DIM]
    first = page_size * kv_head
    keys, values = op[KEYS] + dim * first, op[VALUES] + dim * first
    key_scales, value_scales = op[KEY_SCALES] + 4 * first, op[VALUE_SCALES] + 4 * first
    return Int8Pages(keys, values, key_scales, value_scales, table, kv_heads, page_size, dim)


@compiled
def _rotate_head(x: int, norm: int, dim: int, eps: Any, cos: int, sin: int, out: int) -> None:
    if norm != 0:
        rms_norm(x, norm, dim, eps, x)
    rotate(x, cos, sin, dim, out)


@compiled
def rotate_segment(kv: Any, op: Any, segment: int, kv_head: int, sizes: Any, eps: Any, scratch: int) -> None:
    """A segment's tokens, one kv head with its group of query heads."""
    dim, page_size, heads, kv_heads = sizes[HEAD_DIM], sizes[PAGE_SIZE], sizes[HEADS], sizes[KV_HEADS]
    group = heads // kv_heads
    token, position, count, table = _read_segment(segment)
    for t in range(count):
        cos = sizes[COS] + 2 * dim * (position + t)
        sin = sizes[SIN] + 2 * dim * (position + t)
        row = op[INPUT] + 4 * (token + t) * op[LD_INPUT]
        # Queries are kept as [kv head, token, head of the group, dim]: a segment's rows are contiguous.
        queries = op[QUERIES] + 2 * dim * group * (kv_head * sizes[LD_QUERIES] + token + t)
        for g in range(group):
            _rotate_head(row + 4 * dim * (kv_head * group + g), op[Q_NORM], dim, eps, cos, sin, scratch)
            for i in range(0, dim, 16):
                store_bfloat16(queries + 2 * (g * dim + i), load(scratch + 4 * i))
        page = np.int64(load_i32(table + 4 * ((position + t) // page_size)))
        at = page_size * (page * kv_heads + kv_head)
        slot = (position + t) % page_size
        _rotate_head(row + 4 * dim * (heads + kv_head), op[K_NORM], dim, eps, cos, sin, scratch)
        value = row + 4 * dim * (heads + kv_heads + kv_head)
        room = scratch + 4 * dim
        if len(kv) == 1:
            write_key_int8(scratch, dim, op[KEYS] + dim * at, op[KEY_SCALES] + 4 * at, slot, room)
            write_value_int8(value, dim, op[VALUES] + dim * at, op[VALUE_SCALES] + 4 * at, slot, room)
        else:
            write_key(scratch, dim, op[KEYS] + 2 * dim * at, slot, room)
            write_value(value, dim, op[VALUES] + 2 * dim * at, slot)


@compiled
def _fetch_slots(kv: Any, op: Any, segment: int, sizes: Any) -> None:
    """Load what a token's keys and values are about to be written into: stores wait for one line after the other."""
    dim, page_size, kv_heads = sizes[HEAD_DIM], sizes[PAGE_SIZE], sizes[KV_HEADS]
    _, position, _, table = _read_segment(segment)
    page, slot = np.int64(load_i32(table + 4 * (position // page_size))), position % page_size
    item = 1 if len(kv) == 1 else 2
    for kv_head in range(kv_heads):
        at = item * dim * page_size * (page * kv_heads + kv_head)
        fetch_lines(op[KEYS] + at + 16 * item * dim * (slot // 16), 16 * item * dim)
        fetch_lines(op[VALUES] + at + 4 * dim * (slot // (4 // item)), 4 * dim)


@compiled
def attend_tile(
    level: Any, kv: Any, op: Any, step: Any, sizes: Any, scale: Any, eps: Any, tile: int, scratch: int
) -> None:
    """One kv head of a segment or, with many segments, all: what comes next is then known, and loaded ahead."""
    kv_heads = sizes[KV_HEADS]
    if step[SPANS] > 0:
        _attend_span(level, kv, op, step, sizes, scale, tile, scratch)
        return
    if step[NUM_SEGMENTS] >= WHOLE_SEGMENTS:
        if step[SINGLE]:
            _fetch_slots(kv, op, step[SEGMENTS] + 32 * tile, sizes)
        for kv_head in range(kv_heads):
            _attend_head(level, kv, op, step, sizes, scale, eps, tile, kv_head, kv_heads, scratch)
    else:
        kv_head = tile % kv_heads
        _attend_head(level, kv, op, step, sizes, scale, eps, tile // kv_heads, kv_head, kv_head + 1, scratch)


@compiled
def _attend_head(
    level: Any,
    kv: Any,
    op: Any,
    step: Any,
    sizes: Any,
    scale: Any,
    eps: Any,
    index: int,
    kv_head: int,
    end: int,
    scratch: int,
) -> None:
    dim, page_size, kv_heads = sizes[HEAD_DIM], sizes[PAGE_SIZE], sizes[KV_HEADS]
    at = step[SEGMENTS] + 32 * index
    if step[SINGLE]:
        rotate_segment(kv, op, at, kv_head, sizes, eps, scratch)
    segment = _read_segment(at)
    following, item = 0, 1 if len(kv) == 1 else 2
    if op[WINDOW] == 0:
        if kv_head + 1 < end:
            following = op[KEYS] + item * dim * page_size * (kv_heads * load_i32(segment.table) + kv_head + 1)
        elif kv_head > 0 and index + sizes[THREADS] < step[NUM_SEGMENTS]:  # most likely what this thread takes next
            table = _read_segment(at + 32 * sizes[THREADS]).table
            following = op[KEYS] + item * dim * page_size * kv_heads * load_i32(table)
    rows = _query_rows(op, sizes, segment, kv_head, scale)
    if len(kv) == 1:
        found = attend_int8(level, rows, _int8_pages(op, sizes, segment.table, kv_head), scratch, following)
    else:
        found = attend(level, rows, _pages(op, sizes, segment.table, kv_head), scratch, following)
    _write_rows(op, found, segment.token, segment.num_tokens, kv_head, rows.group, dim)


@compiled
def _write_rows(op: Any, rows: int, token: int, count: int, kv_head: int, group: int, dim: int) -> None:
    """A kv head's float32 results [count * group, dim] in the next layer's input type."""
    for t in range(count):
        row, column = rows + 4 * t * group * dim, kv_head * group * dim
        at = (token + t) * op[LD_OUTPUT] + column
        if op[FORMAT] == INT8:  # only where heads are whole groups
            scales = op[SCALES] + 4 * ((token + t) * op[LD_SCALES] + column // INT8_GROUP * SCALE_WORDS)
            quantize_row(row, group * dim, group * dim, op[FACTORS] + 4 * column, op[OUTPUT] + at, scales)
        elif op[FORMAT] == FLOAT32:
            for i in range(0, group * dim, 16):
                store(op[OUTPUT] + 4 * (at + i), load(row + 4 * i))
        else:
            for i in range(0, group * dim, 16):
                store_bfloat16(op[OUTPUT] + 2 * (at + i), load(row + 4 * i))


@compiled
def _attend_span(level: Any, kv: Any, op: Any, step: Any, sizes: Any, scale: Any, tile: int, scratch: int) -> None:
    """One span of one kv head of a segment of one token, into the span's state."""
    page_size, kv_heads, spans = sizes[PAGE_SIZE], sizes[KV_HEADS], step[SPANS]
    span, kv_head = tile % spans, tile // spans % kv_heads
    segment = _read_segment(step[SEGMENTS] + 32 * (tile // spans // kv_heads))
    position, table = segment.position, segment.table
    if span > position // SPAN or span < first_page(position, op[WINDOW], page_size) * page_size // SPAN:
        return
    rows = _query_rows(op, sizes, segment, kv_head, scale)
    state = step[STATES] + tile * state_bytes(rows.group, sizes[HEAD_DIM])
    until = min(position, (span + 1) * SPAN - 1)
    if len(kv) == 1:
        int8_pages = _int8_pages(op, sizes, table, kv_head)
        split_queries(rows, int8_pages, scratch)
        attend_span_int8(level, rows, int8_pages, scratch, span, state, until, 0)
    else:
        attend_span(level, rows, _pages(op, sizes, table, kv_head), scratch, span, state, until, 0)


@compiled
def merge_tile(level: Any, op: Any, step: Any, sizes: Any, tile: int) -> None:
    """The spans of one kv head of a segment."""
    dim, page_size, kv_heads, spans = sizes[HEAD_DIM], sizes[PAGE_SIZE], sizes[KV_HEADS], step[SPANS]
    group = sizes[HEADS] // kv_heads
    kv_head = tile % kv_heads
    token, position, _, _ = _read_segment(step[SEGMENTS] + 32 * (tile // kv_heads))
    size = state_bytes(group, dim)
    states = step[STATES] + tile * spans * size
    first = first_page(position, op[WINDOW], page_size) * page_size // SPAN
    whole = states + first * size
    for span in range(first + 1, position // SPAN + 1):
        merge_states(level, group, dim, whole, states + span * size)
    normalise(group, dim, whole)
    _write_rows(op, whole, token, 1, kv_head, group, dim)
