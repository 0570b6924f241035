"""When requests are sent in an open loop: gamma (Poisson) arrivals at a rate, with a linear ramp."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator


def arrivals(rate: float, burstiness: float, ramp: float, rng: random.Random) -> Iterator[float]:
    """Seconds after the start, ascending, without end.

    Gaps are gamma distributed with shape ``burstiness`` and mean ``1 / rate``: 1 is Poisson, less comes in bursts, more
    is evener. During the first ``ramp`` seconds the rate grows linearly from 0: each arrival is moved to where the
    cumulated rate reaches it. An infinite rate sends everything at once.
    """
    expected = 0.0  # requests that the rate has called for up to now
    while True:
        expected += rng.gammavariate(burstiness, 1 / burstiness)
        yield 0.0 if math.isinf(rate) else _time_of(expected, rate, ramp)


def _time_of(expected: float, rate: float, ramp: float) -> float:
    in_ramp = rate * ramp / 2
    if expected < in_ramp:
        return math.sqrt(2 * ramp * expected / rate)
    return ramp / 2 + expected / rate
