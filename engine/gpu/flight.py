"""Work that was submitted and not yet collected: what the host remembers of it, and its results once they came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ringserve.engine.gpu.step_buffers import StepBuffers
from ringserve.engine.gpu.step_plan import StepPlan
from ringserve.engine.gpu.step_results import HostLogprobs, logprob_words
from ringserve.messages.logprobs import LogprobColumns, SlotPromptLogprobs


@dataclass(frozen=True)
class Flight:
    """Lists are in the order of the rows that draw, as the device has them."""

    buffers: StepBuffers
    words: torch.Tensor
    """Its results: tokens, then the rows' log probabilities, then the prompts'. There once the event is over."""
    plan: StepPlan
    slots: list[int]
    tenants: list[int]
    """Which sequence had each of these slots."""
    ks: list[int]
    """Log probabilities asked for by each."""
    width: int
    """Of a row of log probabilities; 0: there are none."""
    prompt_width: int

    @cached_property
    def tokens(self) -> list[int]:
        """-1: there was nothing to draw from."""
        tokens: list[int] = self.words[: self.plan.num_draws].tolist()
        return tokens

    def logprobs(self, rows: Sequence[int]) -> LogprobColumns | None:
        """Of some rows, in this order; None where none of them asked."""
        ks = [self.ks[row] for row in rows]
        if max(ks, default=-1) < 0:
            return None
        num_draws = self.plan.num_draws
        return HostLogprobs.read(self.words[num_draws:], num_draws, self.width).columns(rows, ks)

    def prompt_logprobs(self) -> tuple[SlotPromptLogprobs, ...]:
        """What the step found, slot by slot."""
        found = None
        if self.prompt_width:
            rows = self.plan.num_draws + len(self.plan.wanted_prompt)
            words = self.words[len(self.words) - logprob_words(rows, self.prompt_width) :]
            found = HostLogprobs.read(words, rows, self.prompt_width)
        results = [part.result(found) for part in self.plan.prompts]
        return tuple([result for result in results if result is not None])
