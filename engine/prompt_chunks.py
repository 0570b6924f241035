"""Chunks of prompts that together keep a step within a time."""

from __future__ import annotations

import math

from ringserve.engine.step_time import StepCosts, StepShape

SMALLEST_CHUNK = 4
"""Prompt tokens that a step takes whatever the time says, so that no prompt starves."""


class PromptChunks:
    """The chunks of one step, beside the rows that decode in it."""

    def __init__(self, costs: StepCosts, shape: StepShape, seconds: float) -> None:
        self._costs = costs
        self._shape = shape
        self._seconds = seconds
        self._num_taken = 0

    def limit(self, num_computed: int) -> int:
        """Tokens that the next chunk may have, of a prompt of which ``num_computed`` are computed."""
        costs = self._costs
        # seconds = fixed + linear x + square x^2 for a chunk of x tokens
        fixed = costs.predict(self._shape) + costs.per_sequence + costs.per_context_token * num_computed
        linear = costs.per_token + costs.per_prompt_token + costs.per_context_token
        linear += costs.per_pair * (num_computed + 0.5)
        square = costs.per_pair / 2
        left = self._seconds - fixed
        if left <= 0:
            tokens = 0.0
        elif square > 0:
            tokens = 2 * left / (linear + math.sqrt(linear * linear + 4 * square * left))
        else:
            tokens = left / linear if linear > 0 else math.inf
        floor = max(0, SMALLEST_CHUNK - self._num_taken)
        return max(floor, int(min(tokens, 2**31)))

    def take(self, num_computed: int, num_tokens: int) -> None:
        """A chunk was planned."""
        self._shape = self._shape.with_chunk(num_computed, num_tokens)
        self._num_taken += num_tokens
