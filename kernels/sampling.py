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

from math import inf, isfinite, log

import numpy as np
from numpy.typing import NDArray

from ringserve.kernels.top_k import top_k_ids

SAMPLED_TOKEN = 0
"""The purpose word of the Philox counter of a token's uniform."""

BLOCK = 256
"""Weights summed at once before the token is looked for inside one block."""

MIN_TEMPERATURE = 1e-30
"""Below it a float32 quotient would leave the type's range; the result is the same."""

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
    if 0 < top_k < len(row):
        ids = top_k_ids(row, top_k)
        weights = _weights(row, ids, float(row[ids[0]]), temperature)
        if top_p < 1.0:
            count = _top_p_count(weights, top_p * float(weights.sum()))
            ids, weights = ids[:count], weights[:count]
    elif top_p < 1.0:
        ids, weights = _top_p_of_all(row, top_p, temperature)
    elif min_p > 0.0:
        top = float(row.max())
        # A little deeper than min_p: the exact comparison follows.
        ids = np.flatnonzero(row >= top + temperature * log(min_p) - 1e-4 * (temperature + abs(top)))
        weights = _weights(row, ids, top, temperature)
    else:
        return _draw_from_all(row, temperature, uniform)
    if min_p > 0.0:
        kept = weights >= min_p
        ids, weights = ids[kept], weights[kept]
    order = np.argsort(ids)
    return int(ids[order][_inverse_cdf(weights[order], uniform)])


def _weights(row: NDArray[np.float32], ids: NDArray[np.int64], top: float, temperature: float) -> NDArray[np.float64]:
    return np.exp((row[ids].astype(np.float64) - top) / temperature)


def _all_weights(row: NDArray[np.float32], temperature: float) -> NDArray[np.float32]:
    """float32 weights of the whole row."""
    weights: NDArray[np.float32] = row - row.max()
    if temperature != 1.0:
        weights /= np.float32(temperature)
    np.exp(weights, out=weights)
    return weights


def _top_p_count(weights: NDArray[np.float64], target: float) -> int:
    """How many of the descending weights it takes to reach ``target``; all where rounding keeps them below it."""
    return min(int(np.searchsorted(np.cumsum(weights), target)) + 1, len(weights))


def _top_p_of_all(
    row: NDArray[np.float32], top_p: float, temperature: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Ids that top_p keeps of the whole row and their weights, in descending order."""
    all_weights = _all_weights(row, temperature)
    target = top_p * float(all_weights.sum(dtype=np.float64))
    top = float(row.max())
    for depth in _TOP_P_DEPTHS:
        # Bounds in weights, not in logits: a row of equal weights must not be cut within.
        ids = np.flatnonzero(all_weights >= np.exp(-depth))
        if depth != inf and float(all_weights[ids].sum(dtype=np.float64)) < target * (1 + 1e-6):
            continue
        ids = ids[np.argsort(-row[ids], kind="stable")]
        weights = _weights(row, ids, top, temperature)
        count = _top_p_count(weights, target)
        return ids[:count], weights[:count]
    raise AssertionError("the last depth keeps every token")


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


def _inverse_cdf(weights: NDArray[np.float64], uniform: float) -> int:
    """First index whose cumulative weight reaches ``uniform`` of the sum."""
    ends = np.cumsum(weights)
    return min(int(np.searchsorted(ends, uniform * float(ends[-1]))), len(weights) - 1)
