"""Arrival times: seeded, and of the distribution they claim."""

from __future__ import annotations

import math
import random
import statistics
from itertools import islice

import pytest

from ringserve.bench.arrivals import arrivals


def times(count: int, rate: float, burstiness: float = 1.0, ramp: float = 0.0, seed: int = 0) -> list[float]:
    return list(islice(arrivals(rate, burstiness, ramp, random.Random(seed)), count))


def gaps(values: list[float]) -> list[float]:
    return [later - earlier for earlier, later in zip([0.0, *values], values, strict=False)]


def test_a_seed_gives_the_same_times() -> None:
    assert times(50, 3.0) == times(50, 3.0)
    assert times(50, 3.0) != times(50, 3.0, seed=1)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_rate_and_spread(burstiness: float) -> None:
    """Gamma gaps: mean 1 / rate, coefficient of variation 1 / sqrt(burstiness)."""
    found = gaps(times(20000, 5.0, burstiness))
    assert statistics.fmean(found) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(found) / statistics.fmean(found) == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_poisson_counts() -> None:
    """In a Poisson process the number in a second has its mean as variance."""
    found = times(20000, 10.0)
    counts = [0] * int(found[-1])
    for at in found:
        if int(at) < len(counts):
            counts[int(at)] += 1
    assert statistics.variance(counts) == pytest.approx(statistics.fmean(counts), rel=0.1)


def test_infinite_rate_is_all_at_once() -> None:
    assert times(5, math.inf) == [0.0] * 5


def test_ramp_grows_linearly() -> None:
    """Half of the ramp's time sees a quarter of its requests; afterwards the rate is full."""
    found = times(30000, 100.0, burstiness=100.0, ramp=100.0)
    assert found == sorted(found)
    assert sum(at < 100 for at in found) == pytest.approx(5000, rel=0.02)
    assert sum(at < 50 for at in found) == pytest.approx(1250, rel=0.02)
    assert sum(100 <= at < 200 for at in found) == pytest.approx(10000, rel=0.02)
