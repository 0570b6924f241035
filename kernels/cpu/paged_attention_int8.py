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

from typing import Any

import numpy as np

from ringserve.kernels.cpu.attention_spans import (
    LOWEST,
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
from ringserve.kernels.cpu.codes import (
    larger_or_nan,
    largest_or_nan,
    store_split_signed,
    store_split_unsigned,
)
from ringserve.kernels.cpu.compiled import compiled
from ringserve.kernels.cpu.exponentials import exp2_coarse
from ringserve.kernels.cpu.llvm import load_f32, load_i32, store_f32, store_i32
from ringserve.kernels.cpu.paged_attention import MAX_ROWS, fetch_lines
from ringserve.kernels.cpu.quad_product import key_product, value_product
from ringserve.kernels.cpu.vector import (
    absolute,
    add,
    broadcast,
    divide,
    keep_between,
    largest_lane,
    maximum,
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


def scratch_bytes_int8(dim: int, page_size: int) -> int:
    """What ``attend_int8`` needs: queries, four numbers of each row, products, weights, and two states."""
    return MAX_ROWS * (2 * dim + 4 * 4 + 4 * page_size + 2 * page_size) + 2 * state_bytes(MAX_ROWS, dim)


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
    top = broadcast(np.float32(LOWEST))
    partial = first > 0 or last < 16 * vectors
    if partial:
        for v in range(vectors):
            s = keep_between(load(scores + 64 * v), 16 * v, first, last)
            store(scores + 64 * v, s)
            top = maximum(s, top)
    else:
        for v in range(vectors):
            top = maximum(load(scores + 64 * v), top)
    largest = largest_lane(top)
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
def split_queries(queries: int, rows: int, dim: int, scale: Any, scratch: int) -> None:
    """Prepare ``rows`` rows of bfloat16 for ``attend_span_int8``, at the beginning of its scratch memory."""
    scales = scratch + MAX_ROWS * 2 * dim
    for r in range(rows):
        high = scratch + 2 * dim * r
        start = scales + 4 * (MAX_ROWS + r)
        store_f32(scales + 4 * r, scale * _split_query(queries + 2 * dim * r, dim, high, high + dim, start))


@compiled
def attend_span_int8(
    level: Any,
    rows: int,
    group: int,
    first_position: int,
    window: int,
    keys: int,
    values: int,
    key_scales: int,
    value_scales: int,
    table: int,
    kv_heads: int,
    page_size: int,
    dim: int,
    scratch: int,
    span: int,
    state: int,
    until: int,
    following: int,
) -> None:
    """One span's part of ``attend_int8``, into ``state`` (``attention_spans``), with the queries that ``split_queries``
    left in ``scratch``. ``until``: the last position that the caller goes on to; what lies there is loaded ahead,
    a page at a time, then the keys at ``following`` (0: none) and the values in the same place of theirs."""
    row_scales = scratch + MAX_ROWS * 2 * dim
    starts = row_scales + MAX_ROWS * 4
    factors = starts + MAX_ROWS * 4
    gains = factors + MAX_ROWS * 4
    scores = gains + MAX_ROWS * 4
    weights = scores + MAX_ROWS * 4 * page_size
    totals, maxima = totals_of(state, rows, dim), maxima_of(state, rows, dim)
    clear_state(state, rows, dim, np.float32(0))
    for r in range(rows):
        store_f32(scales_of(state, rows, dim) + 4 * r, load_f32(row_scales + 4 * r))
    last_position = min(first_position + (rows - 1) // group, (span + 1) * SPAN - 1)
    stride = kv_heads * page_size
    page = max(first_page(first_position, window, page_size), span * SPAN // page_size)
    while page * page_size <= last_position:
        base = page * page_size
        num_keys = min(page_size, last_position + 1 - base)
        vectors = (num_keys + 15) // 16
        at = load_i32(table + 4 * page) * stride
        page += 1
        ahead = following - keys if following != 0 else dim * at
        if page * page_size <= until:
            next_page = load_i32(table + 4 * page) * stride
            ahead, ahead_keys = dim * next_page, until + 1 - page * page_size
            scale_bytes = 4 * min(page_size, ahead_keys)
            fetch_lines(key_scales + 4 * next_page, scale_bytes)
            fetch_lines(value_scales + 4 * next_page, scale_bytes)
            if ahead_keys < page_size:  # partly filled: the products would fetch all of it
                fetch_lines(keys + ahead, (ahead_keys + 15) // 16 * (16 * dim))
                fetch_lines(values + ahead, (ahead_keys + 3) // 4 * (4 * dim))
                ahead = dim * at
        key_product(
            level,
            scratch,
            2 * dim,
            dim,
            keys + dim * at,
            64,
            16 * dim,
            dim // 4,
            scores,
            4 * page_size,
            starts,
            key_scales + 4 * at,
            rows,
            vectors,
            keys + ahead,
        )
        for r in range(rows):
            position = first_position + r // group
            high = weights + 2 * page_size * r
            _softmax_row(
                level,
                scores + 4 * page_size * r,
                high,
                high + page_size,
                value_scales + 4 * at,
                vectors,
                position - window + 1 - base if window > 0 else 0,
                position + 1 - base,
                load_f32(row_scales + 4 * r),
                maxima + 4 * r,
                totals + 64 * r,
                factors + 4 * r,
                gains + 4 * r,
            )
        value_product(
            level,
            weights,
            2 * page_size,
            page_size,
            values + dim * at,
            4 * dim,
            64,
            (num_keys + 3) // 4,
            state,
            4 * dim,
            factors,
            gains,
            rows,
            dim // 16,
            values + ahead,
        )


@compiled
def attend_int8(
    level: Any,
    queries: int,
    rows: int,
    group: int,
    first_position: int,
    window: int,
    scale: Any,
    keys: int,
    values: int,
    key_scales: int,
    value_scales: int,
    table: int,
    kv_heads: int,
    page_size: int,
    dim: int,
    scratch: int,
    following: int,
) -> int:
    """Attend with ``rows`` query rows [rows, dim] (bfloat16, contiguous): ``group`` heads of the token at
    ``first_position``, then of the next one. Returns the address of float32 [rows, dim] inside ``scratch``.

    ``keys``, ``values``, ``key_scales``, ``value_scales``: page 0 of the kv head, of arrays ``[pages, kv_heads,
    page_size, ...]``; page i of the sequence is the int32 ``table[i]``. ``window``: 0 for none. ``scale`` includes
    log2(e). ``following``: where the keys begin that the caller goes on with, 0 for none; they are loaded ahead.
    """
    whole = scratch + MAX_ROWS * (2 * dim + 16 + 6 * page_size)
    part = whole + state_bytes(MAX_ROWS, dim)
    split_queries(queries, rows, dim, scale, scratch)
    last_position = first_position + (rows - 1) // group
    first = first_page(first_position, window, page_size) * page_size // SPAN
    for span in range(first, last_position // SPAN + 1):
        state = whole if span == first else part
        attend_span_int8(
            level, rows, group, first_position, window, keys, values, key_scales, value_scales, table, kv_heads,
            page_size, dim, scratch, span, state, last_position, following,
        )  # fmt: skip
        if span > first:
            merge_states(level, rows, dim, whole, part)
    normalise(rows, dim, whole)
    return whole
