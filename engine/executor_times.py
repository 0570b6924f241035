"""What the executor's time went into: steps, and waiting for one although there was work."""

from __future__ import annotations

from ringserve.messages.steps import ModelRunnerOutput


class ExecutorTimes:
    """Sums over the steps answered; all times are ``time.monotonic_ns()`` of the executor."""

    def __init__(self) -> None:
        self.busy_ns = 0
        self.idle_ns = 0
        self._last_sent_ns = 0
        self._had_work = False

    def on_result(self, output: ModelRunnerOutput) -> float:
        """Seconds from where the executor could begin this step (the last one's end, or its arrival) to its end."""
        if self._had_work:
            self.idle_ns += max(0, output.started_ns - self._last_sent_ns)
        self.busy_ns += max(0, output.sent_ns - output.started_ns)
        began_ns = max(self._last_sent_ns, output.received_ns)
        self._last_sent_ns = output.sent_ns
        return (output.sent_ns - began_ns) * 1e-9

    def on_planned(self, has_work: bool) -> None:
        """The result was taken. With work left, the time until the next step starts is the engine's fault."""
        self._had_work = has_work
