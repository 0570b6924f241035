"""A step as the scheduler remembers it: being planned, in flight, and answered."""

from __future__ import annotations

from dataclasses import dataclass, field

from ringserve.engine.prompt_chunks import PromptChunks
from ringserve.engine.scheduler_outputs import OutputBatch
from ringserve.engine.sequence import Sequence
from ringserve.engine.step_time import StepShape
from ringserve.messages.stats import StepTimes


@dataclass(slots=True)
class StepPlan:
    """A step while it is being put together; nothing of it is booked before it is complete."""

    budget: int
    """Tokens that may still be added."""
    num_tokens: dict[Sequence, int] = field(default_factory=dict)
    new_pages: dict[Sequence, list[int]] = field(default_factory=dict)
    """Of those that get any."""
    admitted: dict[Sequence, int] = field(default_factory=dict)
    """Sequences that start, with the tokens whose keys and values they find in their pages."""
    chunks: PromptChunks | None = None
    """Where prompts may not take the whole budget."""

    def chunk(self, num_computed: int, num_tokens: int) -> int:
        """How many of the next ``num_tokens`` tokens of a prompt fit into the step."""
        num_tokens = min(num_tokens, self.budget)
        if self.chunks is not None and num_tokens > 0:
            num_tokens = min(num_tokens, self.chunks.limit(num_computed))
            self.chunks.take(num_computed, num_tokens)
        return num_tokens

    def add(self, sequence: Sequence, num_tokens: int, new_pages: list[int]) -> None:
        self.num_tokens[sequence] = num_tokens
        if new_pages:
            self.new_pages[sequence] = new_pages
        self.budget -= num_tokens

    def remove(self, sequence: Sequence) -> None:
        """A sequence that ran before loses its part in the step, if it had one."""
        if sequence in self.admitted:
            raise AssertionError(f"{sequence} was admitted and thrown out in the same step")
        self.budget += self.num_tokens.pop(sequence, 0)
        self.new_pages.pop(sequence, None)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step in flight: columns, one entry for each sequence in it."""

    step_id: int
    scheduled_ns: int
    sequences: list[Sequence]
    slots: list[int]
    """As of this step: a sequence may have left its slot since."""
    num_tokens: list[int]
    samples: list[bool]
    """It reaches the last known token, so the executor draws the next."""
    shape: StepShape
    has_swaps: bool
    """Pages are copied before it: its time is not that of its shape."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step's result came to."""

    outputs: OutputBatch
    times: StepTimes
    request_ids: frozenset[int]
    """Every request that had a part in the step, even where no row came of it (a chunk of a prompt)."""
