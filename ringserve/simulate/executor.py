"""An executor that computes nothing: it keeps the lengths of what its slots hold and knows how long steps take."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from ringserve.engine.step_time import StepShape
from ringserve.messages.steps import ModelRunnerOutput, SchedulerOutput
from ringserve.simulate.step_time import StepTime

Ints = npt.NDArray[np.int64]

TOKEN_IDS = 1 << 15
"""Tokens that it draws lie below."""


class SimulatedExecutor:
    """Takes steps in order; each begins when it is there and the one before has ended."""

    def __init__(self, num_slots: int, step_time: StepTime) -> None:
        self._step_time = step_time
        self._computed = np.zeros(num_slots, dtype=np.int64)
        """Tokens of each slot whose keys and values are computed."""
        self._known = np.zeros(num_slots, dtype=np.int64)
        self._results: deque[ModelRunnerOutput] = deque()
        self._free_ns = 0
        self.busy_ns = 0
        """Sum of all steps' durations."""
        self.num_rows = 0
        self.num_steps = 0

    @property
    def next_ns(self) -> int | None:
        """When the oldest step in flight ends."""
        return self._results[0].sent_ns if self._results else None

    def take_result(self) -> ModelRunnerOutput:
        """Of the oldest step in flight; IndexError if there is none."""
        return self._results.popleft()

    def submit(self, step: SchedulerOutput, now_ns: int) -> None:
        """A step arrives."""
        computed, known = self._computed, self._known
        for new in step.new_sequences:
            computed[new.slot] = new.num_computed_tokens
            known[new.slot] = len(new.token_ids) // 4
        slots = np.frombuffer(step.slots, dtype=np.int32)
        counts = np.frombuffer(step.num_tokens, dtype=np.int32)
        before = computed[slots]
        after = before + counts
        computed[slots] = after
        if bool((after > known[slots]).any()):
            raise AssertionError(f"step {step.step_id} computes tokens that are not known")
        sampled = slots[after == known[slots]]
        known[sampled] += 1
        tokens = (sampled + step.step_id * 977) % TOKEN_IDS
        start_ns = max(now_ns, self._free_ns)
        duration_ns = max(1, round(self._step_time.seconds(_shape(before, after, counts)) * 1e9))
        self._free_ns = start_ns + duration_ns
        self.busy_ns += duration_ns
        self.num_rows += len(slots)
        self.num_steps += 1
        self._results.append(
            ModelRunnerOutput(
                step_id=step.step_id,
                slots=sampled.tobytes(),
                token_ids=tokens.astype(np.int32).tobytes(),
                logprobs=None,
                prompt_logprobs=(),
                received_ns=now_ns,
                started_ns=start_ns,
                sent_ns=self._free_ns,
            )
        )


def _shape(before: Ints, after: Ints, counts: npt.NDArray[np.int32]) -> StepShape:
    total, context = int(counts.sum()), int(after.sum())
    if total == len(counts):  # nobody is in the middle of a prompt
        return StepShape(total, total, 0, context, 0)
    chunks = counts > 1
    lengths = counts[chunks].astype(np.int64)
    pairs = int((lengths * before[chunks] + lengths * (lengths + 1) // 2).sum())
    return StepShape(len(counts), total, int(lengths.sum()), context, pairs)
