"""A scheduler in a few lines, to drive a ModelRunner in one process: FCFS, chunked prefill, no preemption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ringserve.messages.columns import pack_i32, unpack_i32
from ringserve.messages.logprobs import SlotPromptLogprobs
from ringserve.messages.sampling import SamplingParams
from ringserve.messages.steps import ModelRunnerOutput, NewSequence, SchedulerOutput

GREEDY = SamplingParams(seed=0, temperature=0.0, ignore_eos=True)


@dataclass
class Job:
    """A sequence to compute."""

    prompt: Sequence[int]
    max_tokens: int
    sampling: SamplingParams = GREEDY
    choice: int = 0
    generated_before: Sequence[int] = ()
    """Of ``max_tokens``, those that exist already."""
    arrives: int = 0
    """The step it may start at."""
    tokens: list[int] = field(default_factory=list)
    prompt_logprobs: list[SlotPromptLogprobs] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    slot: int = -1
    known: int = 0
    computed: int = 0
    pages: int = 0

    @property
    def done(self) -> bool:
        if self.failures:
            return True
        if self.max_tokens == 0:
            return self.computed >= len(self.prompt)
        return len(self.generated_before) + len(self.tokens) >= self.max_tokens


class Executes(Protocol):
    """Either runner."""

    def execute(self, output: SchedulerOutput, received_ns: int = 0) -> ModelRunnerOutput: ...


class StepPlanner:
    """Runs jobs to their end through one runner."""

    def __init__(self, runner: Executes, num_pages: int, page_size: int, num_slots: int, budget: int) -> None:
        self._runner = runner
        self._free_pages = list(range(1, num_pages + 1))
        self._page_size = page_size
        self._free_slots = list(range(num_slots))
        self._budget = budget
        self._step = 0
        self._freed: list[int] = []
        self.outputs: list[ModelRunnerOutput] = []

    def run(self, jobs: Sequence[Job]) -> list[list[int]]:
        """The generated tokens of every job."""
        owned: dict[int, list[int]] = {}
        first_step = self._step
        while not all(job.done for job in jobs):
            self._step += 1
            budget = self._budget
            rows: list[tuple[Job, int, list[int]]] = []
            new: list[NewSequence] = []
            for job in jobs:
                if job.done or budget == 0 or self._step - first_step <= job.arrives:
                    continue
                if job.slot < 0:
                    if not self._free_slots:
                        continue
                    job.slot = self._free_slots.pop(0)
                    ids = [*job.prompt, *job.generated_before]
                    job.known = len(ids)
                    owned[job.slot] = []
                    new.append(
                        NewSequence(
                            job.slot, pack_i32(ids), len(job.prompt), 0, job.choice, job.sampling, job.max_tokens
                        )
                    )
                count = min(budget, job.known - job.computed)
                needed = -(-(job.computed + count) // self._page_size) - job.pages
                pages = [self._free_pages.pop() for _ in range(needed)]
                owned[job.slot] += pages
                job.pages += needed
                budget -= count
                rows.append((job, count, pages))
            output = self._runner.execute(
                SchedulerOutput(
                    step_id=self._step,
                    new_sequences=tuple(new),
                    slots=pack_i32(job.slot for job, _, _ in rows),
                    num_tokens=pack_i32(count for _, count, _ in rows),
                    new_page_counts=pack_i32(len(pages) for _, _, pages in rows),
                    new_pages=pack_i32(page for _, _, pages in rows for page in pages),
                    freed_slots=pack_i32(self._freed),
                )
            )
            self._freed = []
            self.outputs.append(output)
            by_slot = {job.slot: job for job, _, _ in rows}
            for job, count, _ in rows:
                job.computed += count
            for slot, token in zip(unpack_i32(output.slots), unpack_i32(output.token_ids), strict=True):
                by_slot[slot].tokens.append(token)
                by_slot[slot].known += 1
            for slot, reason in output.failed_slots:
                by_slot[slot].failures.append(reason)
            for part in output.prompt_logprobs:
                by_slot[part.slot].prompt_logprobs.append(part)
            for job, _, _ in rows:
                if job.done:
                    self._free_pages += owned.pop(job.slot)
                    self._free_slots.append(job.slot)
                    self._freed.append(job.slot)
        return [job.tokens for job in jobs]
