"""Drawing a token from a row of logits: exact by definition, so that every implementation draws the same token.

With logits ``x``, temperature ``T > 0`` and ``w_j = exp((x_j - max x) / T)``:

1. top_k: keep the k largest (0: all);
2. top_p: of those, in descending order, keep the shortest run whose weights reach ``top_p`` of their sum;
3. min_p: of those, keep what weighs at least ``min_p`` times the heaviest;
4. of the kept, in ascending token id, take the first whose cumulative weight reaches ``u`` times the sum.

Ties count in ascending token id. ``T = 0`` takes the largest logit. Weights of long rows are computed in float32, sums
in float64: against float64 throughout (``sampling_reference``) the token may differ only where ``u`` (or ``top_p``)
lies within 1e-5 of a boundary. The vocabulary is never sorted, unless the row is so flat that top_p keeps most of it.
"""

from __future__ import annotations

from math import exp, inf, isfinite, log

import numpy as np
from numpy.typing import NDArray

from ringserve.kernels.top_k import lower_bound

SAMPLED_TOKEN = 0
"""The purpose word of the Philox counter of a token's uniform."""

BLOCK = 256
"""Weights summed at once before the token is looked for inside one block."""

MIN_TEMPERATURE = 1e-30
"""Below it a float32 quotient would leave the type's range; the result is the same."""

_LARGEST = float(np.finfo(np.float32).max)

_TOP_P_DEPTHS = (4.0, 8.0, 16.0, inf)
"""How far below the maximum (in ``(x - max) / T``) top_p looks, one after the other."""


def clean(row: NDArray[np.float32]) -> NDArray[np.float32] | None:
    """The row with NaN as -inf and +inf as the largest finite value; None where no token can be drawn."""
    top = float(row.max())
    if isfinite(top):
        return row
    row = np.nan_to_num(row, nan=-inf, posinf=float(np.finfo(np.float32).max), neginf=-inf)
    return row if isfinite(float(row.max())) else None


def draw(row: NDArray[np.float32], temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    """Draw a token id from a ``clean`` row with ``temperature > 0``. 0 < uniform < 1."""
    temperature = max(temperature, MIN_TEMPERATURE)
    top = float(row.max())
    if 0 < top_k < len(row):
        ids = np.flatnonzero(row >= lower_bound(row, top_k))
        descending = np.sort(row[ids])[::-1][:top_k]
        if top_p < 1.0:
            weights = _weights(descending, top, temperature)
            descending = descending[: _top_p_count(weights, top_p * float(weights.sum()))]
        ids = _largest(row, ids, descending)
    elif top_p < 1.0:
        ids = _top_p_of_all(row, top, top_p, temperature)
    elif min_p > 0.0:
        # A little deeper than min_p: the exact comparison follows.
        bound = top + temperature * log(min_p) - 1e-4 * (temperature + abs(top))
        ids = np.flatnonzero(row >= max(bound, -_LARGEST))
    else:
        return _draw_from_all(row, temperature, uniform)
    weights = _weights(row[ids], top, temperature)
    if min_p > 0.0:
        kept = weights >= min_p
        ids, weights = ids[kept], weights[kept]
    ends = np.cumsum(weights)
    return int(ids[min(int(np.searchsorted(ends, uniform * float(ends[-1]))), len(ids) - 1)])


def _weights(logits: NDArray[np.float32], top: float, temperature: float) -> NDArray[np.float64]:
    weights: NDArray[np.float64] = np.exp((logits.astype(np.float64) - top) / temperature)
    return weights


def _all_weights(row: NDArray[np.float32], temperature: float) -> NDArray[np.float32]:
    """float32 weights of the whole row."""
    with np.errstate(over="ignore"):  # to -inf, as it should be
        weights: NDArray[np.float32] = row - row.max()
        if temperature != 1.0:
            weights /= np.float32(temperature)
    np.exp(weights, out=weights)
    return weights


def _largest(row: NDArray[np.float32], ids: NDArray[np.int64], descending: NDArray[np.float32]) -> NDArray[np.int64]:
    """Of ascending ``ids``, those whose logits are ``descending`` (the largest ones, sorted), the first ones of a tie.

    Sorting values and looking up the last one is several times quicker than a stable sort of the ids.
    """
    logits, last = row[ids], descending[-1]
    kept = logits > last
    ties = np.flatnonzero(logits == last)[: len(descending) - int(np.count_nonzero(kept))]
    kept[ties] = True
    largest: NDArray[np.int64] = ids[kept]
    return largest


def _top_p_count(weights: NDArray[np.float64], target: float) -> int:
    """How many of the descending weights it takes to reach ``target``; all where rounding keeps them below it."""
    return min(int(np.searchsorted(np.cumsum(weights), target)) + 1, len(weights))


def _top_p_of_all(row: NDArray[np.float32], top: float, top_p: float, temperature: float) -> NDArray[np.int64]:
    """Ids that top_p keeps of the whole row, ascending."""
    all_weights = _all_weights(row, temperature)
    target = top_p * float(all_weights.sum(dtype=np.float64))
    for depth in _TOP_P_DEPTHS:
        # All tokens above a weight, so that a tie is never cut here.
        ids = np.flatnonzero(all_weights >= np.float32(exp(-depth)))
        if depth == inf or float(all_weights[ids].sum(dtype=np.float64)) >= target * (1 + 1e-6):
            break
    descending = np.sort(row[ids])[::-1]
    count = _top_p_count(_weights(descending, top, temperature), target)
    return _largest(row, ids, descending[:count])


def _draw_from_all(row: NDArray[np.float32], temperature: float, uniform: float) -> int:
    weights = _all_weights(row, temperature)
    starts = np.arange(0, len(row), BLOCK)
    ends = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    target = uniform * float(ends[-1])
    block = min(int(np.searchsorted(ends, target)), len(ends) - 1)
    before = float(ends[block - 1]) if block else 0.0
    inside = before + np.cumsum(weights[starts[block] : starts[block] + BLOCK], dtype=np.float64)
    at = int(np.searchsorted(inside, target))
    if at == len(inside):  # The two sums round differently: the block's last token that weighs anything.
        at = int(np.flatnonzero(weights[starts[block] : starts[block] + BLOCK])[-1])
    return int(starts[block]) + at
