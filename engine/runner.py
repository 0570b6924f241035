"""What the executor knows of whatever computes its steps, on the CPU or on a GPU."""

from __future__ import annotations

from typing import Protocol

from ringserve.messages.steps import ModelRunnerOutput, SchedulerOutput


class Runner(Protocol):
    """Computes steps in the order in which they are submitted."""

    @property
    def max_in_flight(self) -> int:
        """Steps that may be submitted before the oldest is collected."""

    @property
    def num_in_flight(self) -> int:
        """Steps submitted and not collected."""

    def submit(self, output: SchedulerOutput, received_ns: int = 0) -> None:
        """Begin a step. Raises RuntimeError for one that does not fit what the runner knows."""

    def is_ready(self) -> bool:
        """Whether the oldest step is done."""

    def collect(self) -> ModelRunnerOutput:
        """The oldest step's result; waits for it. Raises RuntimeError where the device failed."""

    def close(self) -> None:
        """Give back threads and memory. Nothing may be submitted afterwards."""
