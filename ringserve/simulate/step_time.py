"""How long a step takes, from what it computes: a curve that is fitted to measured steps, and its file.

    seconds = f(tokens) + sequences x per_sequence + context x per_context_token + pairs x per_pair

``f`` never falls and is linear between knots: on CPUs a step of a few tokens costs what reading the weights costs, and
arithmetic takes over from there. Output layer and sampling are done once for each sequence; keys and values of the
context are read once for each row; a chunk of a prompt attends from each of its tokens to all before it.

All terms are linear in their coefficients, so sums of steps (the time to a first token) can be fitted like single ones.
``ringserve.engine.step_time`` is what a running scheduler fits for itself: cheaper, online, and without the curve.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from ringserve.engine.step_time import StepShape
from ringserve.options import OptionError

Floats = npt.NDArray[np.float64]


class StepTime(Protocol):
    """Anything that knows what steps take."""

    def seconds(self, shape: StepShape) -> float:
        """Of one step, from one result to the next while the executor never waits."""


class StepTimeCurve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The formula of this module's head."""

    knots: tuple[int, ...]
    """Tokens, ascending."""
    knot_seconds: tuple[float, ...]
    """``f`` at the knots. Below the first one it is constant; beyond the last it goes on as before it."""
    per_sequence: float = 0.0
    per_context_token: float = 0.0
    per_pair: float = 0.0

    def __post_init__(self) -> None:
        if not self.knots or len(self.knots) != len(self.knot_seconds):
            raise ValueError("a step-time curve needs one time for each knot, and at least one")
        if any(later <= earlier for earlier, later in pairwise(self.knots)) or self.knots[0] < 0:
            raise ValueError("the knots of a step-time curve ascend from 0 or above")
        values = (*self.knot_seconds, self.per_sequence, self.per_context_token, self.per_pair)
        if not all(0 <= value < float("inf") for value in values) or not any(self.knot_seconds):
            raise ValueError("the times of a step-time curve are finite, not negative, and not all 0")

    def seconds(self, shape: StepShape) -> float:
        """Predicted duration of a step."""
        return (
            self._of_tokens(shape.num_tokens)
            + shape.num_sequences * self.per_sequence
            + shape.num_context_tokens * self.per_context_token
            + shape.num_pairs * self.per_pair
        )

    def _of_tokens(self, tokens: int) -> float:
        knots, seconds = self.knots, self.knot_seconds
        if tokens <= knots[0]:
            return seconds[0]
        if len(knots) == 1:
            return seconds[0]
        index = min(bisect_left(knots, tokens), len(knots) - 1)
        slope = (seconds[index] - seconds[index - 1]) / (knots[index] - knots[index - 1])
        return seconds[index] + (tokens - knots[index]) * slope


def straight_line(step_ms: float, token_ms: float, context_us: float = 0.0) -> StepTimeCurve:
    """So many milliseconds a step and a token, and microseconds for each token of each row's context."""
    return StepTimeCurve(
        knots=(0, 1), knot_seconds=(step_ms / 1e3, (step_ms + token_ms) / 1e3), per_context_token=context_us / 1e6
    )


class Engine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the scheduler has to know of the server that was measured."""

    num_pages: int
    page_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A measured time and the steps that took it."""

    shapes: tuple[StepShape, ...]
    seconds: float
    with_overhead: bool
    """The time is one to a first token, with the request's way in and out."""


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fitted curve with where it comes from, as it is kept in a file."""

    step_time: StepTimeCurve
    request_overhead_s: float = 0.0
    """From sending a request to the scheduler's queue and from the scheduler back to the client, together."""
    engine: Engine | None = None
    about: dict[str, str] = {}
    """Server, machine, date."""
    samples: tuple[Sample, ...] = ()
    """What was measured."""

    def save(self, path: Path) -> None:
        """As JSON; raises OSError."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")


def read_step_time(text: str) -> Calibration:
    """``linear:STEP_MS:TOKEN_MS[:CONTEXT_US]``, or the name of a file that ``--calibrate`` wrote.

    Raises:
        OptionError: neither.
    """
    if text.startswith("linear:"):
        try:
            step, token, *context = map(float, text.split(":")[1:])
            (context_us,) = context or (0.0,)
            return Calibration(straight_line(step, token, context_us))
        except ValueError:
            raise OptionError(
                f"--step-time: {text!r} is not linear:STEP_MS:TOKEN_MS[:CONTEXT_US] with times of 0 or above"
            ) from None
    try:
        return msgspec.json.decode(Path(text).read_bytes(), type=Calibration)
    except OSError as error:
        raise OptionError(f"--step-time: {text}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise OptionError(f"--step-time: {text}: not a file of `ringserve simulate --calibrate`: {error}") from None


class Fit(NamedTuple):
    """A curve and how well it fits."""

    step_time: StepTimeCurve
    request_overhead_s: float
    errors: tuple[float, ...]
    """Predicted over measured, less 1, for each sample."""


def fit(samples: Sequence[Sample], knots: Sequence[int]) -> Fit:
    """The curve that has the least squared relative errors, with no coefficient below 0.

    Raises:
        ValueError: no samples, or times that are not positive.
    """
    if not samples or any(sample.seconds <= 0 for sample in samples):
        raise ValueError("a fit needs samples with positive times")
    knots = tuple(sorted(set(knots)))
    rows = np.array([_features(sample, knots) for sample in samples])
    weighted = rows / np.array([[sample.seconds] for sample in samples])
    solution = non_negative_least_squares(weighted, np.ones(len(samples)))
    rises = solution[: len(knots)]
    curve = StepTimeCurve(
        knots=knots,
        knot_seconds=tuple(np.cumsum(rises).tolist()),
        per_sequence=float(solution[-4]),
        per_context_token=float(solution[-3]),
        per_pair=float(solution[-2]),
    )
    return Fit(curve, float(solution[-1]), tuple((weighted @ solution - 1).tolist()))


def _features(sample: Sample, knots: Sequence[int]) -> Floats:
    """By how much each coefficient counts: the rise of ``f`` up to each knot, the other terms, the overhead."""
    found = np.zeros(len(knots) + 4)
    for shape in sample.shapes:
        found[0] += 1  # f up to the first knot
        for index, (low, high) in enumerate(pairwise(knots), 1):
            part = (shape.num_tokens - low) / (high - low)
            found[index] += max(0.0, part if index == len(knots) - 1 else min(part, 1.0))
        found[-4:-1] += (shape.num_sequences, shape.num_context_tokens, shape.num_pairs)
    found[-1] = sample.with_overhead
    return found


def non_negative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """``x >= 0`` that minimises ``|matrix x - target|``.

    The active-set method of Lawson and Hanson, "Solving Least Squares Problems" (1974), chapter 23.
    """
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    scaled = matrix / scale
    count = matrix.shape[1]
    x = np.zeros(count)
    free = np.zeros(count, dtype=bool)
    for _ in range(10 * count):
        gradient = scaled.T @ (target - scaled @ x)
        gradient[free] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= 1e-10 * max(1.0, float(np.linalg.norm(target))):
            break
        free[best] = True
        while True:
            trial = np.zeros(count)
            trial[free] = np.linalg.lstsq(scaled[:, free], target, rcond=None)[0]
            negative = free & (trial <= 0)
            if not negative.any():
                x = trial
                break
            step = float(np.min(x[negative] / (x[negative] - trial[negative])))
            x = x + step * (trial - x)
            free &= x > 1e-14
            x[~free] = 0.0
    result: Floats = x / scale
    return result
