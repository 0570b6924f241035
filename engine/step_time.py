"""How long a step takes: a linear model of its shape, fitted online from the steps that were measured.

    seconds = base + per_sequence x sequences + per_token x tokens + per_prompt_token x prompt tokens
            + per_context_token x context + per_pair x pairs

Least squares of the *relative* error, so that a decode step of 20 ms counts as much as a prompt chunk of a second, with
exponential forgetting (machines get slower and faster) and costs that are never negative (a prediction for a shape
that was never seen must not be). What makes it usable from the first step on:

* The costs before any measurement are a guess; the first steps scale them as a whole.
* A few large steps that the guess, so scaled, has made up count as half a measured one each, until steps like them have
  been measured: a hundred prompts of ten tokens, each a little late, say nothing of what ten thousand cost.
* Each update starts from the last solution, and a cost whose term has not been seen for a while keeps its value: an
  hour of decoding does not make the model forget what a prompt costs.
* Outliers (a page fault, a neighbour on the machine) are weighted down by Huber's rule, measured against the spread of
  the recent errors, so that a lasting change is followed and a single one is not. Where the errors lean to one side
  for a while, the past is forgotten faster.

Plain Python: six terms, a few microseconds for an update, no clock, no scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import mul

_FORGETTING = 0.998
"""Weight of a step against the one after it: about 500 steps count."""
_TOLERATED_BIAS = 0.1
_HASTE = 0.05
"""Where recent errors lean to one side beyond that, the past is forgotten faster in proportion."""
_NUM_SCALING_STEPS = 3
"""Steps that scale the guess as a whole."""
_NUM_TRUSTED_STEPS = 8
"""Steps after which the model is worth acting on, and outliers are known as such."""
_SPREADS = 3.0
"""Errors beyond this many times the usual one are outliers."""
_SMALLEST_SPREAD = 0.02
_HOLD = 1e-3
"""How little of a term, against the most that was ever seen of it, still moves its cost."""
_SWEEPS = 3
_SHORTEST = 1e-9
"""Seconds: what is divided by is never nothing."""


def pairs(num_computed: int, num_tokens: int) -> int:
    """Queries times keys of a row: each token attends to those before it and to itself."""
    return num_tokens * num_computed + num_tokens * (num_tokens + 1) // 2


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step computes."""

    num_sequences: int
    num_tokens: int
    num_prompt_tokens: int = 0
    """Those of them that lie in rows of more than one token (chunks of prompts, recomputation)."""
    num_context_tokens: int = 0
    """Keys and values read, each once for each row: the sum of the rows' lengths after the step."""
    num_pairs: int = 0
    """Queries times keys of the rows of more than one token: the attention's work."""

    @staticmethod
    def of(rows: list[tuple[int, int]]) -> StepShape:
        """From (tokens computed before, tokens of this step) of each row."""
        context = tokens = prompt = num_pairs = 0
        for num_computed, num_tokens in rows:
            tokens += num_tokens
            context += num_computed + num_tokens
            if num_tokens > 1:
                prompt += num_tokens
                num_pairs += pairs(num_computed, num_tokens)
        return StepShape(len(rows), tokens, prompt, context, num_pairs)

    def with_chunk(self, num_computed: int, num_tokens: int) -> StepShape:
        """This step and one more row."""
        prompt = num_tokens if num_tokens > 1 else 0
        return StepShape(
            self.num_sequences + 1,
            self.num_tokens + num_tokens,
            self.num_prompt_tokens + prompt,
            self.num_context_tokens + num_computed + num_tokens,
            self.num_pairs + (pairs(num_computed, prompt) if prompt else 0),
        )


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds, by term."""

    base: float
    per_sequence: float
    per_token: float
    per_prompt_token: float
    """On top of ``per_token``."""
    per_context_token: float
    per_pair: float

    @property
    def terms(self) -> tuple[float, ...]:
        """In the order of ``messages.STEP_COSTS``."""
        return (
            self.base,
            self.per_sequence,
            self.per_token,
            self.per_prompt_token,
            self.per_context_token,
            self.per_pair,
        )

    def predict(self, shape: StepShape) -> float:
        """Seconds that a step of this shape takes."""
        return (
            self.base
            + self.per_sequence * shape.num_sequences
            + self.per_token * shape.num_tokens
            + self.per_prompt_token * shape.num_prompt_tokens
            + self.per_context_token * shape.num_context_tokens
            + self.per_pair * shape.num_pairs
        )

    def of_row(self, num_computed: int, num_tokens: int) -> float:
        """Seconds that one more row adds to a step (``StepShape.with_chunk``)."""
        seconds = self.per_sequence + self.per_token * num_tokens
        seconds += self.per_context_token * (num_computed + num_tokens)
        if num_tokens > 1:
            seconds += self.per_prompt_token * num_tokens + self.per_pair * pairs(num_computed, num_tokens)
        return seconds

    def decode_rate(self, num_sequences: int, num_context_tokens: int) -> float:
        """Tokens a second of all sequences together, while that many decode over so much context in all."""
        shape = StepShape(num_sequences, num_sequences, 0, num_context_tokens)
        return num_sequences / max(self.predict(shape), 1e-9)

    def prefill_rate(self, chunk: int, num_computed: int, decoding: StepShape) -> float:
        """Prompt tokens a second of a prompt of which ``num_computed`` are computed, in chunks of ``chunk`` tokens
        beside the sequences that decode."""
        return chunk / max(self.predict(decoding.with_chunk(num_computed, chunk)), 1e-9)


GUESS = StepCosts(
    base=2e-3, per_sequence=1e-4, per_token=2e-4, per_prompt_token=1e-5, per_context_token=1.5e-7, per_pair=1e-7
)
"""The ratios are those of a small model on a CPU; the first steps scale them."""


@dataclass(frozen=True, slots=True)
class _Anchor:
    """A step that nobody measured, and the shapes that make it superfluous."""

    shape: StepShape
    num_prompt_tokens: int = 0
    """A measured step is like it with at least so many of each."""
    num_context_tokens: int = 0
    num_pairs: int = 0

    def is_like(self, shape: StepShape) -> bool:
        return (
            shape.num_prompt_tokens >= self.num_prompt_tokens
            and shape.num_context_tokens >= self.num_context_tokens
            and shape.num_pairs >= self.num_pairs
        )


_ANCHORS = (
    _Anchor(StepShape.of([(0, 256)]), num_prompt_tokens=64),
    _Anchor(StepShape.of([(4096, 256)]), num_pairs=64 * 1024),
    _Anchor(StepShape.of([(2048, 1)] * 32), num_context_tokens=16 * 1024),
)
_ENOUGH = 10
"""Measured steps like it with which a made-up one is left out altogether."""
_ANCHOR_WEIGHT = 0.5
"""Of one, in measured steps; divided by one more than the steps like it that were measured."""


class StepTimeModel:
    """``observe`` what steps took, ``predict`` what they will take.

    With known costs (a calibration that was kept) it starts from those and takes them as fitted.
    """

    def __init__(self, costs: StepCosts | None = None) -> None:
        self._guess = self._costs = costs if costs is not None else GUESS
        self._calibrated = costs is not None
        self._weights = list(self._costs.terms)
        size = len(self._weights)
        self._products = [[0.0] * size for _ in range(size)]
        """Sums over the steps of feature x feature, each over the step's time squared."""
        self._targets = [0.0] * size
        self._peaks = [0.0] * size
        self._spread = 0.1
        self._bias = 0.0
        """Mean error of the recent predictions, with its sign."""
        self._prompt_ratio = 1.0
        self._guess_scale = 1.0
        """What steps take over what was guessed."""
        self._num_like = [0] * len(_ANCHORS)
        self.num_observations = 0

    @property
    def costs(self) -> StepCosts:
        """What the model has come to: its state as a value, to predict with or to keep."""
        return self._costs

    @property
    def is_fitted(self) -> bool:
        """It has seen enough to be acted on."""
        return self._calibrated or self.num_observations >= _NUM_TRUSTED_STEPS

    @property
    def relative_error(self) -> float:
        """Mean absolute error of the recent predictions, over the time taken or predicted (the larger)."""
        return self._spread

    @property
    def prompt_ratio(self) -> float:
        """What the last few steps with prompts took over what was predicted: for whoever has to keep to a time now,
        and cannot wait until the costs have followed."""
        return self._prompt_ratio

    def predict(self, shape: StepShape) -> float:
        """Seconds that a step of this shape takes; a guess until ``is_fitted``."""
        return self._costs.predict(shape)

    def observe(self, shape: StepShape, seconds: float) -> None:
        """A step of this shape took so long."""
        if seconds <= 0:
            return  # two clocks' reading of nothing
        predicted = max(self._costs.predict(shape), _SHORTEST)
        if self.num_observations < _NUM_SCALING_STEPS and not self._calibrated:
            share = 1 / (self.num_observations + 1)
            factor = (seconds / predicted) ** share
            self._weights = [weight * factor for weight in self._weights]
            self._guess_scale *= factor
        else:
            guessed = max(self._guess_scale * self._guess.predict(shape), _SHORTEST)
            self._guess_scale *= (seconds / guessed) ** 0.01
        signed_error = (seconds - predicted) / max(seconds, predicted)
        error = abs(signed_error)
        limit = _SPREADS * max(self._spread, _SMALLEST_SPREAD)
        weight = min(1.0, limit / error) if self.is_fitted and error > 0 else 1.0
        self._spread += 0.05 * (error - self._spread)
        self._bias += 0.05 * (signed_error - self._bias)
        if shape.num_prompt_tokens and self.is_fitted:
            self._prompt_ratio += 0.15 * (min(max(seconds / predicted, 0.5), 2.0) - self._prompt_ratio)
        self.num_observations += 1
        for index, anchor in enumerate(_ANCHORS):
            self._num_like[index] += anchor.is_like(shape)
        self._add(shape, seconds, weight)
        self._solve()

    def _add(self, shape: StepShape, seconds: float, weight: float) -> None:
        features = _features(shape)
        share = weight / (seconds * seconds)
        targets, peaks = self._targets, self._peaks
        forgetting = _FORGETTING - _HASTE * max(0.0, abs(self._bias) - _TOLERATED_BIAS)
        for i, row in enumerate(self._products):
            scaled = features[i] * share
            for j, feature in enumerate(features):
                row[j] = row[j] * forgetting + scaled * feature
            targets[i] = targets[i] * forgetting + scaled * seconds
            if row[i] > peaks[i]:
                peaks[i] = row[i]

    def _solve(self) -> None:
        """Coordinate descent from the last solution, held to it where a term is hardly seen; no cost below zero."""
        weights = self._weights
        start = list(weights)
        products, targets = self._with_anchors()
        for _ in range(_SWEEPS):
            for i, row in enumerate(products):
                hold = _HOLD * self._peaks[i]
                curvature = row[i] + hold
                if curvature == 0.0:
                    continue
                gradient = targets[i] - sum(map(mul, row, weights)) + hold * (start[i] - weights[i])
                weights[i] = max(0.0, weights[i] + gradient / curvature)
        self._costs = StepCosts(*weights)

    def _with_anchors(self) -> tuple[list[list[float]], list[float]]:
        products = self._products
        targets = self._targets
        for anchor, num_like in zip(_ANCHORS, self._num_like, strict=True):
            if num_like > _ENOUGH:
                continue
            seconds = self._guess_scale * self._guess.predict(anchor.shape)
            share = _ANCHOR_WEIGHT / (1 + num_like) / (seconds * seconds)
            features = _features(anchor.shape)
            products = [
                [value + share * feature * other for value, other in zip(row, features, strict=True)]
                for row, feature in zip(products, features, strict=True)
            ]
            targets = [target + share * feature * seconds for target, feature in zip(targets, features, strict=True)]
        return products, targets


def _features(shape: StepShape) -> tuple[float, ...]:
    """In the order of the costs."""
    return (
        1.0,
        shape.num_sequences,
        shape.num_tokens,
        shape.num_prompt_tokens,
        shape.num_context_tokens,
        shape.num_pairs,
    )
