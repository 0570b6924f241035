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

from typing import Any, NamedTuple

import numpy as np
from numba.extending import register_jitable

from ringserve.kernels.cpu.attention_inputs import (
    MAX_ROWS,
    Pages,
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
    state_bytes,
    totals_of,
)
from ringserve.kernels.cpu.compiled import compiled
from ringserve.kernels.cpu.exponentials import exp2_coarse
from ringserve.kernels.cpu.llvm import load_f32, load_i32, store_f32
from ringserve.kernels.cpu.pair_product import pair_product
from ringserve.kernels.cpu.vector import add, broadcast, multiply, multiply_add, sum_lanes
from ringserve.kernels.cpu.vector_memory import load, store, store_rounded

LOG2_E = 1.4426950408889634


class _Scratch(NamedTuple):
    """Addresses in ``attend``'s scratch memory."""

    scores: int
    """float32 [MAX_ROWS, page size]: the rows' scores of a page."""
    weights: int
    """bfloat16 [MAX_ROWS, page size]."""
    factors: int
    """float32 [MAX_ROWS]: what earlier sums shrink by."""
    states: int
    """Two states of ``MAX_ROWS`` rows (``attention_spans``)."""


@register_jitable
def _layout(scratch: int, page_size: int) -> _Scratch:
    weights = scratch + MAX_ROWS * 4 * page_size
    factors = weights + MAX_ROWS * 2 * page_size
    return _Scratch(scratch, weights, factors, factors + MAX_ROWS * 4)


def scratch_bytes(dim: int, page_size: int) -> int:
    """What ``attend`` needs."""
    room: _Scratch = _layout(0, page_size)
    return room.states + 2 * state_bytes(MAX_ROWS, dim)


@compiled
def _softmax_row(
    level: Any,
    scores: int,
    weights: int,
    vectors: int,
    first: int,
    last: int,
    scale: Any,
    state: int,
    total: int,
    factor: int,
) -> None:
    """One row of a page: scores [16 * vectors] -> weights; keys outside [first, last) weigh nothing.

    ``state``: the largest score so far, not yet scaled; ``total``: 16 partial sums of weights; ``factor``: what earlier
    sums shrink by. ``scale`` > 0.
    """
    before = load_f32(state)
    largest = largest_score(scores, vectors, first, last)
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
def attend_span(
    level: Any, rows: QueryRows, pages: Pages, scratch: int, span: int, state: int, until: int, following: int
) -> None:
    """One span's part of ``attend``, into ``state`` (``attention_spans``). ``until``: the last position that the caller
    goes on to; keys up to there are loaded ahead, then those at ``following`` (0: none)."""
    page_size, dim, count = pages.size, pages.dim, rows.num_rows
    at_page = 2 * dim * page_size * pages.kv_heads
    room: _Scratch = _layout(scratch, page_size)
    totals, maxima = totals_of(state, count, dim), maxima_of(state, count, dim)
    clear_state(state, count, dim, rows.scale)
    page, last = span_bounds(rows, page_size, span)
    while page * page_size <= last:
        base = page * page_size
        num_keys = min(page_size, last + 1 - base)
        vectors = (num_keys + 15) // 16
        at = load_i32(pages.table + 4 * page) * at_page
        keys, values = pages.keys + at, pages.values + at
        page += 1
        ahead = following if following != 0 else keys
        if page * page_size <= until:
            ahead = pages.keys + load_i32(pages.table + 4 * page) * at_page
            if until + 1 - page * page_size < page_size:  # partly filled: the product would fetch all of it
                fetch_lines(ahead, (until + 16 - page * page_size) // 16 * (32 * dim))
                ahead = keys
        pair_product(
            level, rows.queries, 2 * dim, keys, 64, 32 * dim, dim // 2, room.scores, 4 * page_size, None, count,
            vectors, values,
        )  # fmt: skip
        for r in range(count):
            first_key, last_key = keys_seen(rows, r, base)
            scores, weights = room.scores + 4 * page_size * r, room.weights + 2 * page_size * r
            _softmax_row(
                level, scores, weights, vectors, first_key, last_key, rows.scale, maxima + 4 * r, totals + 64 * r,
                room.factors + 4 * r,
            )  # fmt: skip
        pair_product(
            level, room.weights, 2 * page_size, values, 4 * dim, 64, (num_keys + 1) // 2, state, 4 * dim,
            room.factors, count, dim // 16, ahead,
        )  # fmt: skip


@compiled
def attend(level: Any, rows: QueryRows, pages: Pages, scratch: int, following: int) -> int:
    """Attend with the ``QueryRows`` to ``Pages`` (``attention_inputs``). Returns the address of float32 [rows.num_rows,
    dim] inside ``scratch``.

    ``following``: where the keys begin that the caller goes on with, 0 for none; they are loaded into the cache.
    """
    whole: int = _layout(scratch, pages.size).states
    part = whole + state_bytes(MAX_ROWS, pages.dim)
    last = last_position(rows)
    first = first_page(rows.position, rows.window, pages.size) * pages.size // SPAN
    for span in range(first, last // SPAN + 1):
        attend_span(level, rows, pages, scratch, span, whole if span == first else part, last, following)
        if span > first:
            merge_states(level, rows.num_rows, pages.dim, whole, part)
    normalise(rows.num_rows, pages.dim, whole)
    return whole
