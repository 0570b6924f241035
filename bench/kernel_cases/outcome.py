"""What a case found, and how it is judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float32: 3e-7}
"""Relative errors of attention that rounding alone explains, by the type of the products."""

SOFTCAP_TOLERANCE = 5e-6
"""tanh through exp loses relative precision near 0."""

FAST_EXP_TOLERANCE = 2e-6
"""Devices have a quick exp2, right to 22 bits."""

FEW_KEYS = 16
"""With fewer, the rounding of a value's scale (a weight is multiplied by it, then rounded) does not average out."""


@dataclass(frozen=True)
class Outcome:
    """Of one case."""

    error: float
    """NaN where poison came through."""
    tolerance: float
    description: str

    @property
    def passed(self) -> bool:
        """Whether the error is a number within the tolerance."""
        return self.error <= self.tolerance


Check = Callable[[int, str], Outcome]
"""Make and run the case of a seed on a device."""


def relative_error(result: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor | None = None) -> float:
    """In norm, or a quarter of the largest one, relative to ``magnitude`` (default: what is expected).

    For sums that cancel, ``magnitude`` is the sum of the terms' magnitudes. The error itself where all is zero.
    """
    error = result.cpu().double() - expected.double()
    magnitude = (magnitude if magnitude is not None else expected).double().abs()
    if error.numel() == 0:
        return 0.0
    if not bool(magnitude.any()):
        return float(error.abs().max())
    largest = float(error.abs().max() / magnitude.max())
    return max(float(error.norm() / magnitude.norm()), largest / 4)
