"""Drawing tokens from rows of logits in compiled code: ``kernels/sampling.py`` is the definition.

Weights are float32 (relative error below 1e-6), sums of 256 of them float32, sums of those float64: a token may differ
from the float64 reference only where the uniform, ``top_p`` or ``min_p`` lies within 1e-5 of a boundary. Everything is
computed for one row alone, in one order, so a token does not depend on the batch.

For compiled code, on one thread, with a workspace of one's own; ``row`` is the address of ``vocab`` float32 (NaN counts
as -inf, +inf as the largest float)::

    best(row, vocab, x, maxima) -> token or -1
    draw(row, vocab, temperature, top_k, top_p, min_p, uniform, x, weights, values, maxima, ids, ones) -> token or -1

-1: no logit is finite. ``Workspace`` makes the arrays. ``uniform`` computes a token's uniform from its counter and key.
"""

from __future__ import annotations

from math import inf, log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringserve.kernels.cpu.aligned import aligned_zeros
from ringserve.kernels.cpu.compiled import compiled
from ringserve.kernels.cpu.row_select import (
    BLOCK,
    LARGEST,
    LOG2_E,
    MINUS_INFINITY,
    clean_row,
    exponentials,
    first_of,
    gather,
    keep,
    keep_heavy,
    pick,
    select,
    total_weight,
    weight_from,
)
from ringserve.kernels.philox import ROUNDS
from ringserve.kernels.sampling import MIN_TEMPERATURE

_DEPTHS = (5.0, 12.0, inf)
"""How far below the maximum (in ``(x - max) / T``) top_p looks, one after the other."""


class Workspace:
    """Memory for one thread and rows of ``vocab`` logits."""

    def __init__(self, vocab: int) -> None:
        room = -(-vocab // BLOCK) * BLOCK + BLOCK
        self.x: NDArray[np.float32] = aligned_zeros((room,), np.float32)
        self.weights: NDArray[np.float32] = aligned_zeros((room,), np.float32)
        self.values: NDArray[np.float32] = aligned_zeros((room,), np.float32)
        self.maxima: NDArray[np.float32] = aligned_zeros((room // BLOCK,), np.float32)
        self.ids: NDArray[np.int32] = aligned_zeros((room,), np.int32)
        self.ones: NDArray[np.float32] = aligned_zeros((room,), np.float32)
        self.ones[:] = 1.0


@compiled
def best(row: int, vocab: int, x: Any, maxima: Any) -> int:
    """The largest logit's token, the first of a tie."""
    top = clean_row(row, vocab, x, maxima)
    return first_of(x, maxima, vocab, top) if top > MINUS_INFINITY else -1


@compiled
def draw(
    row: int,
    vocab: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    uniform: float,
    x: Any,
    weights: Any,
    values: Any,
    maxima: Any,
    ids: Any,
    ones: Any,
) -> int:
    """Draw a token; see the top of this file."""
    top = clean_row(row, vocab, x, maxima)
    if not top > MINUS_INFINITY:
        return -1
    if temperature == 0.0:
        return first_of(x, maxima, vocab, top)
    temperature = max(temperature, MIN_TEMPERATURE)
    scale = np.float32(LOG2_E / temperature)
    if 0 < top_k < vocab:
        count = largest(x, maxima, vocab, top, top_k, values, ids, weights, ones)
        exponentials(values, count, top, scale, weights)
        if top_p < 1.0:
            target = top_p * total_weight(weights, count)
            last, ties = select(values, weights, count, target, MINUS_INFINITY, top)
            count = keep(values, ids, weights, count, last, ties)
    elif top_p < 1.0:
        exponentials(x, vocab, top, scale, weights)
        target = top_p * total_weight(weights, vocab)
        bound, candidates = top, 0
        for depth in _DEPTHS:
            bound = _bound(top, depth * temperature)
            weight, candidates = weight_from(x, weights, vocab, bound)
            if weight >= target:
                break
        if candidates * 4 < vocab:
            count = gather(x, maxima, vocab, bound, values, ids)
            exponentials(values, count, top, scale, weights)
            last, ties = select(values, weights, count, target, bound, top)
        else:
            last, ties = select(x, weights, vocab, target, bound, top)
            count = gather(x, maxima, vocab, last, values, ids)
            exponentials(values, count, top, scale, weights)
        count = keep(values, ids, weights, count, last, ties)
    elif min_p > 0.0:
        # A little deeper than min_p: the exact comparison follows.
        depth = 1e-4 * (temperature + abs(top)) - temperature * log(min_p)
        count = gather(x, maxima, vocab, _bound(top, depth), values, ids)
        exponentials(values, count, top, scale, weights)
    else:
        exponentials(x, vocab, top, scale, weights)
        return pick(weights, vocab, uniform)
    if min_p > 0.0:
        count = keep_heavy(ids, weights, count, np.float32(min_p))
    return int(ids[pick(weights, count, uniform)])


@compiled
def _bound(top: Any, depth: float) -> Any:
    """``top - depth`` as a finite float32."""
    return np.float32(max(np.float64(top) - depth, -np.float64(LARGEST)))


@compiled
def largest(x: Any, maxima: Any, vocab: int, top: Any, k: int, values: Any, ids: Any, weights: Any, ones: Any) -> int:
    """The ``k`` largest values (0 < k <= vocab) and their ids, in ascending id, the first ones of a tie."""
    blocks = (vocab + BLOCK - 1) // BLOCK
    if k <= blocks:
        # k blocks hold at least one value each that reaches the k-th largest maximum.
        bound, ties = select(maxima, ones, blocks, k, MINUS_INFINITY, top)
        count = gather(x, maxima, vocab, bound, values, ids)
        last, ties = select(values, ones, count, k, bound, top)
    else:
        last, ties = select(x, ones, vocab, k, MINUS_INFINITY, top)
        count = gather(x, maxima, vocab, last, values, ids)
    return keep(values, ids, weights, count, last, ties)


@compiled
def draw_rows(
    rows: Any,
    vocab: int,
    parameters: Any,
    top_ks: Any,
    counters: Any,
    tokens: Any,
    x: Any,
    weights: Any,
    values: Any,
    maxima: Any,
    ids: Any,
    ones: Any,
) -> None:
    """One token for each address of ``rows``; -1 where no logit is finite.

    ``parameters [rows, 3]`` float64: temperature, top_p, min_p. ``counters [rows, 6]`` uint32: the Philox counter and
    key.
    """
    for i in range(len(rows)):
        c = counters[i]
        number = uniform(c[0], c[1], c[2], c[3], c[4], c[5])
        tokens[i] = draw(
            rows[i],
            vocab,
            parameters[i, 0],
            top_ks[i],
            parameters[i, 1],
            parameters[i, 2],
            number,
            x,
            weights,
            values,
            maxima,
            ids,
            ones,
        )


@compiled
def best_rows(rows: Any, vocab: int, tokens: Any, x: Any, maxima: Any) -> None:
    """The largest logit's token for each address of ``rows``; -1 where no logit is finite."""
    for i in range(len(rows)):
        tokens[i] = best(rows[i], vocab, x, maxima)


@compiled
def uniform(c0: int, c1: int, c2: int, c3: int, k0: int, k1: int) -> float:
    """Philox4x32-10's first word as a number strictly between 0 and 1; ``kernels/philox.py`` is the definition."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    w0, w1, w2, w3 = np.uint64(c0), np.uint64(c1), np.uint64(c2), np.uint64(c3)
    key_0, key_1 = np.uint64(k0), np.uint64(k1)
    for _ in range(ROUNDS):
        product_0, product_1 = np.uint64(0xD2511F53) * w0, np.uint64(0xCD9E8D57) * w2
        w0, w1, w2, w3 = (
            (product_1 >> half) ^ w1 ^ key_0,
            product_1 & low,
            (product_0 >> half) ^ w3 ^ key_1,
            product_0 & low,
        )
        key_0, key_1 = (key_0 + np.uint64(0x9E3779B9)) & low, (key_1 + np.uint64(0xBB67AE85)) & low
    return (np.float64(w0 >> np.uint64(8)) + 0.5) * 2.0**-24
