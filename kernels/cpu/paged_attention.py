"""Causal attention of a few neighbouring queries over the pages of their sequence, one kv head at a time.

For each query row r (a token's head) with position p_r:

    out_r = sum over t of softmax_t(scale * q_r . k_t) v_t,    p_r - window < t <= p_r

computed page by page with a running maximum (Milakov and Gimelshein, "Online normalizer calculation for softmax",
2018; Dao et al., "FlashAttention", 2022). Pages are taken in ascending order from the first one that some row sees; a
page that a row does not see leaves its state as it is, bit for bit. Hence a row's result is the same in a decode step,
in any chunk of a prompt and among any neighbours. The weights are rounded to bfloat16 before they are summed and
multiplied.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringserve.kernels.cpu.compiled import compiled
from ringserve.kernels.cpu.llvm import load_f32, load_i32, store_f32
from ringserve.kernels.cpu.pair_product import pair_product, pair_product_add
from ringserve.kernels.cpu.vector import (
    add,
    broadcast,
    exp2_coarse,
    keep_between,
    largest_lane,
    load,
    maximum,
    multiply,
    multiply_add,
    prefetch_l2,
    store,
    store_rounded,
    sum_lanes,
)

MAX_ROWS = 64
"""Query rows (tokens x heads of a kv head) of one call."""
LOWEST = -1e30
"""The running maximum before anything was seen; finite, so that no difference of infinities comes up."""
LOG2_E = 1.4426950408889634


def scratch_bytes(dim: int, page_size: int) -> int:
    """What ``attend`` needs: products, weights, sums, and the running state of each row."""
    return MAX_ROWS * (4 * page_size + 2 * page_size + 4 * dim + 64 + 4 + 4)


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
        sums = add(sums, store_rounded(level, weights + 32 * v, weight))
    store(total, sums)


@compiled
def fetch_lines(start: int, size: int) -> None:
    """Ask for so many bytes, into L2."""
    for line in range(0, size, 64):
        prefetch_l2(start + line)


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
    ``following``: where the caller goes on, in bytes from ``keys`` and ``values``; it is loaded into the cache.
    """
    scores = scratch
    weights = scores + MAX_ROWS * 4 * page_size
    out = weights + MAX_ROWS * 2 * page_size
    totals = out + MAX_ROWS * 4 * dim
    states = totals + MAX_ROWS * 64
    factors = states + MAX_ROWS * 4
    zero = broadcast(np.float32(0))
    for r in range(rows):
        for i in range(0, dim, 16):
            store(out + 4 * (r * dim + i), zero)
        store(totals + 64 * r, zero)
        store_f32(states + 4 * r, np.float32(LOWEST))
    last_position = first_position + (rows - 1) // group
    page = 0
    if window > 0 and first_position >= window:
        page = (first_position - window + 1) // page_size
    while page * page_size <= last_position:
        base = page * page_size
        num_keys = min(page_size, last_position + 1 - base)
        vectors = (num_keys + 15) // 16
        at = load_i32(table + 4 * page) * page_stride
        page += 1
        ahead, ahead_keys = following, last_position + 1
        if page * page_size <= last_position:
            ahead, ahead_keys = load_i32(table + 4 * page) * page_stride, last_position + 1 - page * page_size
        if ahead_keys < page_size:  # a page that is partly filled: the products would fetch all of it
            fetch_lines(keys + ahead, (ahead_keys + 15) // 16 * (32 * dim))
            fetch_lines(values + ahead, (ahead_keys + 1) // 2 * (4 * dim))
            ahead = at
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
            rows,
            vectors,
            keys + ahead,
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
                states + 4 * r,
                totals + 64 * r,
                factors + 4 * r,
            )
        pair_product_add(
            level,
            weights,
            2 * page_size,
            values + at,
            4 * dim,
            64,
            (num_keys + 1) // 2,
            out,
            4 * dim,
            factors,
            rows,
            dim // 16,
            values + ahead,
        )
    for r in range(rows):
        by = broadcast(np.float32(1) / sum_lanes(load(totals + 64 * r)))
        for i in range(0, dim, 16):
            at = out + 4 * (r * dim + i)
            store(at, multiply(load(at), by))
    return out
