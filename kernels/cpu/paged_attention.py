"""Causal attention of a few neighbouring queries over the pages of their sequence, one kv head at a time.

For each query row r (a token's head) with position p_r:

    out_r = sum over t of softmax_t(scale * q_r . k_t) v_t,    p_r - window < t <= p_r

computed page by page with a running maximum (Milakov and Gimelshein, "Online normalizer calculation for softmax",
2018; Dao et al., "FlashAttention", 2022), and span by span (``attention_spans``), so that the spans of a long sequence
may be computed by several threads. Pages and spans are taken in ascending order from the first one that some row sees;
one that a row does not see leaves its state as it is, bit for bit. Hence a row's result is the same in a decode step,
in any chunk of a prompt, among any neighbours and on any number of threads. The weights are rounded to bfloat16 before
they are summed and multiplied.
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
    state_bytes,
    totals_of,
)
from ringserve.kernels.cpu.compiled import compiled
from ringserve.kernels.cpu.exponentials import exp2_coarse
from ringserve.kernels.cpu.llvm import load_f32, load_i32, store_f32
from ringserve.kernels.cpu.pair_product import pair_product
from ringserve.kernels.cpu.vector import (
    add,
    broadcast,
    keep_between,
    largest_lane,
    maximum,
    multiply,
    multiply_add,
    sum_lanes,
)
from ringserve.kernels.cpu.vector_memory import load, prefetch_l2, store, store_rounded

MAX_ROWS = 64
"""Query rows (tokens x heads of a kv head) of one call."""
LOG2_E = 1.4426950408889634


def scratch_bytes(dim: int, page_size: int) -> int:
    """What ``attend`` needs: products, weights, what earlier sums shrink by, and two states."""
    return MAX_ROWS * (4 * page_size + 2 * page_size + 4) + 2 * state_bytes(MAX_ROWS, dim)


@compiled
def _softmax_row(
    level: Any,
    scores: int,
    weights: int,
    vectors: int,
    low: int,
    high: int,
    scale: Any,
    state: int,
    total: int,
    factor: int,
) -> None:
    """One row of a page: scores [16 * vectors] -> weights; keys outside [low, high) weigh nothing.

    ``state``: the largest score so far, not yet scaled; ``total``: 16 partial sums of weights; ``factor``: what earlier
    sums shrink by. ``scale`` > 0.
    """
    before = load_f32(state)
    top = broadcast(np.float32(LOWEST))
    if low > 0 or high < 16 * vectors:
        for v in range(vectors):
            s = keep_between(load(scores + 64 * v), 16 * v, low, high)
            store(scores + 64 * v, s)
            top = maximum(s, top)
    else:
        for v in range(vectors):
            top = maximum(load(scores + 64 * v), top)
    largest = largest_lane(top)
    sums = load(total)
    if largest > before:
        shrink = exp2_coarse(level, broadcast((before - largest) * scale))
        store_f32(state, largest)
        sums = multiply(sums, shrink)
        store_f32(factor, sum_lanes(shrink) * np.float32(0.0625))
        before = largest
    else:
        store_f32(factor, np.float32(1))
    by, origin = broadcast(scale), broadcast(-before * scale)
    for v in range(vectors):
        weight = exp2_coarse(level, multiply_add(load(scores + 64 * v), by, origin))
        sums = add(sums, store_rounded(weights + 32 * v, weight))
    store(total, sums)


@compiled
def fetch_lines(start: int, size: int) -> None:
    """Ask for so many bytes, into L2."""
    for line in range(0, size, 64):
        prefetch_l2(start + line)


@compiled
def attend_span(
    level: Any,
    queries: int,
    rows: int,
    group: int,
    first_position: int,
    window: int,
    scale: Any,
    keys: int,
    values: int,
    table: int,
    page_stride: int,
    page_size: int,
    dim: int,
    scratch: int,
    span: int,
    state: int,
    until: int,
    following: int,
) -> None:
    """One span's part of ``attend``, into ``state`` (``attention_spans``). ``until``: the last position that the caller
    goes on to; keys up to there are loaded ahead, then those at ``following`` (0: none)."""
    scores = scratch
    weights = scores + MAX_ROWS * 4 * page_size
    factors = weights + MAX_ROWS * 2 * page_size
    totals, maxima = totals_of(state, rows, dim), maxima_of(state, rows, dim)
    clear_state(state, rows, dim, scale)
    last_position = min(first_position + (rows - 1) // group, (span + 1) * SPAN - 1)
    page = max(first_page(first_position, window, page_size), span * SPAN // page_size)
    while page * page_size <= last_position:
        base = page * page_size
        num_keys = min(page_size, last_position + 1 - base)
        vectors = (num_keys + 15) // 16
        at = load_i32(table + 4 * page) * page_stride
        page += 1
        ahead = following if following != 0 else keys + at
        if page * page_size <= until:
            ahead = keys + load_i32(table + 4 * page) * page_stride
            if until + 1 - page * page_size < page_size:  # partly filled: the product would fetch all of it
                fetch_lines(ahead, (until + 16 - page * page_size) // 16 * (32 * dim))
                ahead = keys + at
        pair_product(
            level,
            queries,
            2 * dim,
            keys + at,
            64,
            32 * dim,
            dim // 2,
            scores,
            4 * page_size,
            None,
            rows,
            vectors,
            values + at,
        )
        for r in range(rows):
            position = first_position + r // group
            low = position - window + 1 - base if window > 0 else 0
            _softmax_row(
                level,
                scores + 4 * page_size * r,
                weights + 2 * page_size * r,
                vectors,
                low,
                position + 1 - base,
                scale,
                maxima + 4 * r,
                totals + 64 * r,
                factors + 4 * r,
            )
        pair_product(
            level,
            weights,
            2 * page_size,
            values + at,
            4 * dim,
            64,
            (num_keys + 1) // 2,
            state,
            4 * dim,
            factors,
            rows,
            dim // 16,
            ahead,
        )


@compiled
def attend(
    level: Any,
    queries: int,
    rows: int,
    group: int,
    first_position: int,
    window: int,
    scale: Any,
    keys: int,
    values: int,
    table: int,
    page_stride: int,
    page_size: int,
    dim: int,
    scratch: int,
    following: int,
) -> int:
    """Attend with ``rows`` query rows [rows, dim] (bfloat16, contiguous): ``group`` heads of the token at
    ``first_position``, then of the next one. Returns the address of float32 [rows, dim] inside ``scratch``.

    ``keys``, ``values``: page 0 of the kv head (``kv_pages`` has the layout); page i of the sequence is
    ``page_stride`` bytes times the int32 ``table[i]`` further. ``window``: 0 for none. ``scale`` includes log2(e).
    ``following``: where the keys begin that the caller goes on with, 0 for none; they are loaded into the cache.
    """
    whole = scratch + MAX_ROWS * (6 * page_size + 4)
    part = whole + state_bytes(MAX_ROWS, dim)
    last_position = first_position + (rows - 1) // group
    first = first_page(first_position, window, page_size) * page_size // SPAN
    for span in range(first, last_position // SPAN + 1):
        state = whole if span == first else part
        attend_span(
            level, queries, rows, group, first_position, window, scale, keys, values, table, page_stride, page_size,
            dim, scratch, span, state, last_position, following,
        )  # fmt: skip
        if span > first:
            merge_states(level, rows, dim, whole, part)
    normalise(rows, dim, whole)
    return whole
