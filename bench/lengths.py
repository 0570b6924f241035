"""Lengths in tokens, drawn from a distribution that is written on the command line."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

FORMS = "N, uniform:LOW:HIGH, normal:MEAN:STD or lognormal:MEDIAN:SIGMA"
LONGEST = 10_000_000
"""Tokens; more than any model's context."""


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths, each from 1 to ``LONGEST``."""

    kind: str
    a: float
    b: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """From the forms in ``FORMS``.

        Raises:
            ValueError: none of them, or out of range.
        """
        kind, *numbers = text.split(":") if ":" in text else ("fixed", text)
        try:
            values = [float(number) for number in numbers]
        except ValueError:
            raise ValueError(f"{text!r} is not {FORMS}") from None
        if (kind, len(values)) not in (("fixed", 1), ("uniform", 2), ("normal", 2), ("lognormal", 2)):
            raise ValueError(f"{text!r} is not {FORMS}")
        if not all(map(math.isfinite, values)) or values[0] < 1 or values[-1] < 0 or max(values) > LONGEST:
            raise ValueError(f"{text!r}: lengths are from 1 to {LONGEST}, spreads at least 0")
        if kind == "lognormal" and values[1] > 10:
            raise ValueError(f"{text!r}: SIGMA is that of the logarithm, at most 10")
        if kind == "uniform" and values[1] < values[0]:
            raise ValueError(f"{text!r}: HIGH is below LOW")
        return cls(kind, *values)

    def draw(self, rng: random.Random) -> int:
        """One length."""
        match self.kind:
            case "uniform":
                return rng.randint(int(self.a), int(self.b))
            case "normal":
                return min(max(1, round(rng.gauss(self.a, self.b))), LONGEST)
            case "lognormal":
                return min(max(1, round(rng.lognormvariate(math.log(self.a), self.b))), LONGEST)
            case _:
                return int(self.a)
