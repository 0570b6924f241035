"""How many prompt tokens a step may take: a fixed number, or what keeps the sequences that decode on time.

A step is as long for those that decode in it as for the prompts that share it. With a target for the time between
tokens (``--target-itl-ms``, or the smallest ``target_tpot_ms`` of the requests that decode in the step), prompts get as
many tokens as the step-time model allows; a few they always get, so that no prompt starves where the target cannot be
kept. A step in which nothing decodes has nobody to keep waiting and takes the whole budget.
"""

from __future__ import annotations

import math

from ringserve.engine.prompt_chunks import PromptChunks
from ringserve.engine.scheduler_step import StepPlan
from ringserve.engine.step_time import StepShape, StepTimeModel


class TokenBudget:
    """The budget of each step."""

    def __init__(self, max_num_tokens: int, target_seconds: float, model: StepTimeModel) -> None:
        self.max_num_tokens = max_num_tokens
        self._target_seconds = target_seconds
        """0: none."""
        self._model = model

    def limit_prompts(self, plan: StepPlan) -> None:
        """The rows that decode are in ``plan``: set what the prompts may take."""
        if not plan.num_tokens or not self._model.is_fitted:
            return
        target = self._target_seconds or math.inf
        for sequence in plan.num_tokens:
            if sequence.request.time_per_token_ns:
                target = min(target, sequence.request.time_per_token_ns * 1e-9)
        if target < math.inf:
            rows = [(sequence.num_computed_tokens, num) for sequence, num in plan.num_tokens.items()]
            plan.chunks = PromptChunks(self._model.costs, StepShape.of(rows), target / self._model.prompt_ratio)
