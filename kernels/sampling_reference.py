"""Sampling as ARCHITECTURE.md defines it, with full sorts and float64 weights, straight from the definition. For tests.

Logits are processed in float32 (they are float32 values), everything from the temperature on is float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ReferenceDraw:
    """The token, and how close the decision was."""

    token_id: int | None
    """None where no logit is finite."""
    margin: float
    """Distance of the uniform (and of top_p, min_p) from a boundary: below 1e-5 another token is right too."""


def process_reference(
    logits: NDArray[np.float32],
    prompt: Sequence[int],
    generated: Sequence[int],
    *,
    bias: Mapping[int, float],
    repetition: float,
    presence: float,
    frequency: float,
    hidden: Sequence[int],
) -> NDArray[np.float32]:
    """Bias, penalties over the whole vocabulary, and the mask."""
    x = logits.astype(np.float32).copy()
    for token_id, value in bias.items():
        x[token_id] += np.float32(value)
    counts = np.bincount(np.asarray(generated, dtype=np.int64), minlength=len(x))
    seen = np.bincount(np.asarray([*prompt, *generated], dtype=np.int64), minlength=len(x)) > 0
    penalized = np.where(x > 0, x / np.float32(repetition), x * np.float32(repetition))
    x = np.where(seen, penalized, x).astype(np.float32)
    x = (x - np.where(counts > 0, counts * frequency + presence, 0.0).astype(np.float32)).astype(np.float32)
    for token_id in hidden:
        x[token_id] = -np.inf
    return x


def draw_reference(
    x: NDArray[np.float32], temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> ReferenceDraw:
    """Draw from processed logits."""
    x = np.where(np.isnan(x), -np.inf, x).astype(np.float64)
    if not np.isfinite(x).any():
        return ReferenceDraw(None, 1.0)
    if temperature == 0.0:
        return ReferenceDraw(int(np.argmax(x)), 1.0)
    margin = 1.0
    order = np.argsort(-x, kind="stable")
    weights = np.exp((x[order] - x.max()) / temperature)
    if top_k > 0:
        order, weights = order[:top_k], weights[:top_k]
    if top_p < 1.0:
        cumulative = np.cumsum(weights / weights.sum())
        margin = min(margin, float(np.abs(cumulative - top_p).min()))
        count = min(int(np.count_nonzero(cumulative < top_p)) + 1, len(order))
        order, weights = order[:count], weights[:count]
    if min_p > 0.0:
        margin = min(margin, float(np.abs(weights[weights < 1.0] - min_p).min(initial=1.0)))
        order, weights = order[weights >= min_p], weights[weights >= min_p]
    by_id = np.argsort(order)
    order, weights = order[by_id], weights[by_id]
    cumulative = np.cumsum(weights / weights.sum())
    margin = min(margin, float(np.abs(cumulative[:-1] - uniform).min(initial=1.0)))
    at = min(int(np.count_nonzero(cumulative < uniform)), len(order) - 1)
    return ReferenceDraw(int(order[at]), margin)
