"""The largest logits of a row, computed again from weights that were not quantised.

    rescore_row(x, weight, bias, k, logits, columns, tile_columns, best, stride)

An output layer in int8 makes errors that matter where two logits are almost equal, at the top of the row, and reading
all its weights in bfloat16 would take twice as long. So the int8 layer chooses candidates, and this computes them anew:
every logit that is no smaller than the largest ones of the ``CANDIDATES`` tiles in which these are largest. All of the
row's ``CANDIDATES`` largest logits are among them.

``x`` float32 ``[k]``: the layer's input, not rounded, ``k`` a multiple of 16. ``weight`` bfloat16 ``[columns, k]``,
``bias`` float32 ``[columns]``. ``logits`` float32 ``[columns]``, with room for 15 more, cut into tiles of
``tile_columns``. ``best`` int64: the tiles' best keys (``row_best``), ``stride`` keys apart; those of tiles that have
changed are made new. A row with NaN stays as it is. One order of additions, whatever else the step computes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringserve.kernels.cpu.compiled import compiled
from ringserve.kernels.cpu.llvm import load_f32, load_i64, store_f32, store_i64
from ringserve.kernels.cpu.row_best import best_key, key_columns
from ringserve.kernels.cpu.vector import add, broadcast, multiply_add, sum_lanes
from ringserve.kernels.cpu.vector_memory import load, load_bfloat16

CANDIDATES = 8
"""With 64 instead, or the whole output layer in bfloat16, no more of the default model's best tokens were those of
float32 (in each of 16 windows of 512 tokens)."""
_NO_KEY = np.int64(np.iinfo(np.int64).max)


@compiled
def rescore_row(
    x: int,
    weight: int,
    bias: int,
    k: int,
    logits: int,
    columns: int,
    tile_columns: int,
    best: int,
    stride: int,
) -> None:
    """See the top of this file."""
    tiles = (columns + tile_columns - 1) // tile_columns
    last = _last_candidate(best, stride, tiles)
    # In a small vocabulary all of them.
    bound = np.float32(-np.inf) if tiles < CANDIDATES else load_f32(logits + 4 * key_columns(last))
    for tile in range(tiles):
        at = best + 8 * stride * tile
        if load_i64(at) < last:
            continue
        first = tile * tile_columns
        count = min(tile_columns, columns - first)
        for column in range(first, first + count):
            if load_f32(logits + 4 * column) >= bound:
                logit = _dot(x, weight + 2 * k * column, k) + load_f32(bias + 4 * column)
                store_f32(logits + 4 * column, logit)
        store_i64(at, best_key(logits + 4 * first, count, first))


@compiled
def _last_candidate(best: int, stride: int, tiles: int) -> Any:
    """The smallest of the ``CANDIDATES`` largest keys, which are all different."""
    bound = _NO_KEY
    for _ in range(min(CANDIDATES, tiles)):
        largest = load_i64(best)
        found = False
        for tile in range(tiles):
            key = load_i64(best + 8 * stride * tile)
            if key < bound and (not found or key > largest):
                largest, found = key, True
        bound = largest
    return bound


@compiled
def _dot(x: int, weight: int, k: int) -> Any:
    """Of ``k`` float32 and bfloat16, in float32."""
    zero = broadcast(np.float32(0))
    s0, s1, s2, s3 = zero, zero, zero, zero
    i = 0
    while i + 64 <= k:
        s0 = multiply_add(load(x + 4 * i), load_bfloat16(weight + 2 * i), s0)
        s1 = multiply_add(load(x + 4 * i + 64), load_bfloat16(weight + 2 * i + 32), s1)
        s2 = multiply_add(load(x + 4 * i + 128), load_bfloat16(weight + 2 * i + 64), s2)
        s3 = multiply_add(load(x + 4 * i + 192), load_bfloat16(weight + 2 * i + 96), s3)
        i += 64
    while i < k:
        s0 = multiply_add(load(x + 4 * i), load_bfloat16(weight + 2 * i), s0)
        i += 16
    return sum_lanes(add(add(s0, s1), add(s2, s3)))
