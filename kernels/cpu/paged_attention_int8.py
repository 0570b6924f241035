"""Causal attention over int8 keys and values: ``paged_attention`` for pages of ``kv_pages_int8``.

For each query row r (a token's head) with position p_r, key codes ``K_t`` with scale ``k_t`` and value codes ``V_t``
with scale ``v_t``:

    s_t   = scale * k_t * (q_r . K_t)                      p_r - window < t <= p_r
    out_r = sum over t of (softmax_t(s) * v_t) V_t

No key and no value is ever widened: the row of queries becomes numbers of 16 bits with one scale for the row, the
weights of a page times ``v_t`` become numbers of 16 bits with one scale for the page, and the products are exact sums
of bytes (``quad_product``). 16 bits leave an error below that of bfloat16, which plain pages have there.

A page's weights are taken relative to the largest score that the row sees in that page, so that a page far from the
running maximum keeps its 16 bits; the running maximum (Milakov and Gimelshein, 2018; Dao et al., 2022) only scales the
page's sum. Pages and spans are taken in ascending order, as in ``paged_attention``; a row's result is the same in a
decode step, in any chunk of a prompt, among any neighbours and on any number of threads, since every number above is
the row's own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba.extending import register_jitable

from ringserve.kernels.cpu.attention_inputs import (
    MAX_ROWS,
    Int8Pages,
    QueryRows,
    fetch_lines,
    keys_seen,
    largest_score,
    last_position,
    span_bounds,
)
from ringserve.kernels.cpu.attention_spans import (
    SPAN,
    clear_state,
    first_page,
    maxima_of,
    merge_states,
    normalise,
    scales_of,
    state_bytes,
    totals_of,
)
from ringserve.kernels.cpu.codes import larger_or_nan, largest_or_nan, store_split_signed, store_split_unsigned
from ringserve.kernels.cpu.compiled import compiled
from ringserve.kernels.cpu.exponentials import exp2_coarse
from ringserve.kernels.cpu.llvm import load_f32, load_i32, store_f32, store_i32
from ringserve.kernels.cpu.quad_product import key_product, value_product
from ringserve.kernels.cpu.vector import (
    absolute,
    add,
    broadcast,
    divide,
    multiply,
    multiply_add,
    sum_lanes,
    zero_outside,
)
from ringserve.kernels.cpu.vector_memory import load, load_bfloat16, store

QUERY_STEPS = 32639.0
"""The largest magnitude that two signed bytes say as 256 * high + low."""
WEIGHT_STEPS = 65535.0
SMALLEST_STEP = 1e-30
"""Of a row of zeros: a score of minus infinity must stay one."""


class _Scratch(NamedTuple):
    """Addresses in ``attend_int8``'s scratch memory."""

    queries: int
    """[MAX_ROWS, high or low, dim] bytes: numbers of 16 bits."""
    scales: int
    """float32 [MAX_ROWS]: of the rows' scores, the size of their queries' steps included."""
    starts: int
    """int32 [MAX_ROWS]: what takes back the keys' 128."""
    factors: int
    """float32 [MAX_ROWS]: what earlier sums shrink by."""
    gains: int
    """float32 [MAX_ROWS]: what one step of a page's weights is worth."""
    scores: int
    """float32 [MAX_ROWS, page size]: the rows' scores of a page."""
    weights: int
    """[MAX_ROWS, high or low, page size] bytes: numbers of 16 bits."""
    states: int
    """Two states of ``MAX_ROWS`` rows (``attention_spans``)."""


@register_jitable
def _layout(scratch: int, page_size: int, dim: int) -> _Scratch:
    scales, four = scratch + MAX_ROWS * 2 * dim, MAX_ROWS * 4
    scores = scales + 4 * four
    weights = scores + MAX_ROWS * 4 * page_size
    states = weights + MAX_ROWS * 2 * page_size
    return _Scratch(scratch, scales, scales + four, scales + 2 * four, scales + 3 * four, scores, weights, states)


def scratch_bytes_int8(dim: int, page_size: int) -> int:
    """What ``attend_int8`` needs."""
    room: _Scratch = _layout(0, page_size, dim)
    return room.states + 2 * state_bytes(MAX_ROWS, dim)


@compiled
def _split_query(query: int, dim: int, high: int, low: int, start: int) -> Any:
    """One row of bfloat16 as numbers of 16 bits; returns the size of their steps. ``start``: where the sum that takes
    back the keys' 128 goes."""
    largest = broadcast(np.float32(0))
    for i in range(0, dim, 16):
        largest = larger_or_nan(largest, absolute(load_bfloat16(query + 2 * i)))
    step = largest_or_nan(largest) / np.float32(QUERY_STEPS)
    if step < np.float32(SMALLEST_STEP):
        step = np.float32(SMALLEST_STEP)
    by = broadcast(step)
    sums = broadcast(np.float32(0))
    for i in range(0, dim, 16):
        rounded = store_split_signed(high + i, low + i, divide(load_bfloat16(query + 2 * i), by))
        sums = add(sums, rounded)  # whole numbers below 2**24: exact
    total = sum_lanes(sums)
    if not np.abs(total) < np.float32(16777216):  # not of numbers; the step is NaN or infinite and shows it
        total = np.float32(0)
    store_i32(start, -128 * np.int64(total))
    return step


@compiled
def _exp2(level: Any, x: Any) -> Any:
    return sum_lanes(exp2_coarse(level, broadcast(x))) * np.float32(0.0625)


@compiled
def _softmax_row(
    level: Any,
    scores: int,
    high: int,
    low: int,
    value_scales: int,
    vectors: int,
    first: int,
    last: int,
    scale: Any,
    state: int,
    total: int,
    factor: int,
    gain: int,
) -> None:
    """One row of a page: scores [16 * vectors] -> weights times the values' scales, in 16 bits; keys outside
    [first, last) weigh nothing.

    ``state``: the largest score so far, not yet scaled; ``total``: 16 partial sums of weights; ``factor``: what earlier
    sums shrink by; ``gain``: what one step of this page's weights is worth. ``scale`` > 0.
    """
    largest, partial = largest_score(scores, vectors, first, last), first > 0 or last < 16 * vectors
    zero = broadcast(np.float32(0))
    by, origin = broadcast(scale), broadcast(-largest * scale)
    sums, heaviest = zero, zero
    for v in range(vectors):
        weight = exp2_coarse(level, multiply_add(load(scores + 64 * v), by, origin))
        sums = add(sums, weight)
        weight = multiply(weight, load(value_scales + 64 * v))
        if partial:  # scales of what was not written
            weight = zero_outside(weight, 16 * v, first, last)
        heaviest = larger_or_nan(heaviest, weight)
        store(scores + 64 * v, weight)
    most = largest_or_nan(heaviest)
    steps = broadcast(np.float32(WEIGHT_STEPS) / most if most != np.float32(0) else np.float32(0))
    for v in range(vectors):
        store_split_unsigned(high + 16 * v, low + 16 * v, multiply(load(scores + 64 * v), steps))
    before = load_f32(state)
    shrink = np.float32(1)
    if largest > before:
        shrink = _exp2(level, (before - largest) * scale)
        store_f32(state, largest)
        share = np.float32(1)
    else:
        share = _exp2(level, (largest - before) * scale)
    store_f32(factor, shrink)
    store_f32(gain, share * most / np.float32(WEIGHT_STEPS))
    store(total, multiply_add(sums, broadcast(share), multiply(load(total), broadcast(shrink))))


@compiled
def split_queries(rows: QueryRows, pages: Int8Pages, scratch: int) -> None:
    """Prepare the rows for ``attend_span_int8``, in its scratch memory."""
    dim = pages.dim
    room: _Scratch = _layout(scratch, pages.size, dim)
    for r in range(rows.num_rows):
        high = room.queries + 2 * dim * r
        step = _split_query(rows.queries + 2 * dim * r, dim, high, high + dim, room.starts + 4 * r)
        store_f32(room.scales + 4 * r, rows.scale * step)


@compiled
def attend_span_int8(
    level: Any, rows: QueryRows, pages: Int8Pages, scratch: int, span: int, state: int, until: int, following: int
) -> None:
    """One span's part of ``attend_int8``, into ``state`` (``attention_spans``), with the queries that ``split_queries``
    left in ``scratch``. ``until``: the last position that the caller goes on to; what lies there is loaded ahead,
    a page at a time, then the keys at ``following`` (0: none) and the values in the same place of theirs."""
    page_size, dim, count = pages.size, pages.dim, rows.num_rows
    at_page = pages.kv_heads * page_size
    room: _Scratch = _layout(scratch, page_size, dim)
    totals, maxima = totals_of(state, count, dim), maxima_of(state, count, dim)
    clear_state(state, count, dim, np.float32(0))
    for r in range(count):
        store_f32(scales_of(state, count, dim) + 4 * r, load_f32(room.scales + 4 * r))
    page, last = span_bounds(rows, page_size, span)
    while page * page_size <= last:
        base = page * page_size
        num_keys = min(page_size, last + 1 - base)
        vectors = (num_keys + 15) // 16
        at = load_i32(pages.table + 4 * page) * at_page
        keys, values, value_scales = pages.keys + dim * at, pages.values + dim * at, pages.value_scales + 4 * at
        page += 1
        ahead = following - pages.keys if following != 0 else dim * at
        if page * page_size <= until:
            next_page = load_i32(pages.table + 4 * page) * at_page
            ahead, ahead_keys = dim * next_page, until + 1 - page * page_size
            scale_bytes = 4 * min(page_size, ahead_keys)
            fetch_lines(pages.key_scales + 4 * next_page, scale_bytes)
            fetch_lines(pages.value_scales + 4 * next_page, scale_bytes)
            if ahead_keys < page_size:  # partly filled: the products would fetch all of it
                fetch_lines(pages.keys + ahead, (ahead_keys + 15) // 16 * (16 * dim))
                fetch_lines(pages.values + ahead, (ahead_keys + 3) // 4 * (4 * dim))
                ahead = dim * at
        key_product(
            level, room.queries, 2 * dim, dim, keys, 64, 16 * dim, dim // 4, room.scores, 4 * page_size, room.starts,
            pages.key_scales + 4 * at, count, vectors, pages.keys + ahead,
        )  # fmt: skip
        for r in range(count):
            first_key, last_key = keys_seen(rows, r, base)
            scores, high = room.scores + 4 * page_size * r, room.weights + 2 * page_size * r
            _softmax_row(
                level, scores, high, high + page_size, value_scales, vectors, first_key, last_key,
                load_f32(room.scales + 4 * r), maxima + 4 * r, totals + 64 * r, room.factors + 4 * r,
                room.gains + 4 * r,
            )  # fmt: skip
        value_product(
            level, room.weights, 2 * page_size, page_size, values, 4 * dim, 64, (num_keys + 3) // 4, state, 4 * dim,
            room.factors, room.gains, count, dim // 16, pages.values + ahead,
        )  # fmt: skip


@compiled
def attend_int8(level: Any, rows: QueryRows, pages: Int8Pages, scratch: int, following: int) -> int:
    """Attend with the ``QueryRows`` to ``Int8Pages`` (``attention_inputs``). Returns the address of float32
    [rows.num_rows, dim] inside ``scratch``.

    ``following``: where the keys begin that the caller goes on with, 0 for none; they are loaded ahead.
    """
    whole: int = _layout(scratch, pages.size, pages.dim).states
    part = whole + state_bytes(MAX_ROWS, pages.dim)
    split_queries(rows, pages, scratch)
    last = last_position(rows)
    first = first_page(rows.position, rows.window, pages.size) * pages.size // SPAN
    for span in range(first, last // SPAN + 1):
        attend_span_int8(level, rows, pages, scratch, span, whole if span == first else part, last, following)
        if span > first:
            merge_states(level, rows.num_rows, pages.dim, whole, part)
    normalise(rows.num_rows, pages.dim, whole)
    return whole
