"""The highest request rate at which enough requests keep their objectives."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import msgspec

from ringserve.simulate.figures import Figures

PRECISION = 1.02
"""Where the search ends: the rate that fails over the one that holds."""
FARTHEST = 24
"""Doublings or halvings before the search gives up."""


class HighestRate(msgspec.Struct, frozen=True):
    """What the search found for one policy."""

    policy: str
    part: float
    """Of the requests, that must keep the objectives."""
    requests_per_s: float | None
    """None: even the lowest rate that was tried fails."""
    unbounded: bool
    """The highest rate that was tried holds as well: the load ends before the server is behind."""
    probes: tuple[tuple[float, float], ...]
    """(rate, part that kept them), in the order in which they were tried."""


def highest_rate(policy: str, part: float, start: float, run_at: Callable[[float], Figures]) -> HighestRate:
    """Doubles (or halves) the rate from ``start`` until it fails (or holds), then closes in by bisection.

    What holds at a rate is taken to hold below it. ``run_at`` must give goodput.
    """
    probes: list[tuple[float, float]] = []

    def holds(rate: float) -> bool:
        goodput = run_at(rate).goodput
        if goodput is None:
            raise ValueError("a search needs objectives")
        probes.append((rate, goodput.part))
        return goodput.part >= part

    low = high = start
    rising = holds(start)
    for _ in range(FARTHEST):
        if rising:
            low, high = high, 2 * high
            if not holds(high):
                break
        else:
            low, high = low / 2, low
            if holds(low):
                break
    else:
        return HighestRate(policy, part, high if rising else None, rising, tuple(probes))
    while high / low > PRECISION:
        middle = sqrt(low * high)
        if holds(middle):
            low = middle
        else:
            high = middle
    return HighestRate(policy, part, low, False, tuple(probes))
