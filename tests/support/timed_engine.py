"""The scheduler's simulated engine with a clock: steps take what a step-time model says.

The loop is the server's: results and requests are taken in the order of their times, and after each of them as many
steps are planned as may be in flight.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Any

import msgspec
from scheduler_inputs import executor_ready
from scheduler_simulation import Engine

from ringserve.config import SchedulerConfig
from ringserve.engine.step_time import StepCosts, StepShape
from ringserve.messages.requests import RequestRefused, TokenizedRequest

SECOND = 10**9
COSTS = StepCosts(
    base=10e-3, per_sequence=1e-4, per_token=5e-4, per_prompt_token=0.0, per_context_token=1e-6, per_pair=1e-7
)


class TimedEngine:
    """An ``Engine`` that runs in simulated time."""

    def __init__(self, ready: dict[str, int] | None = None, **config: Any) -> None:
        self.engine = Engine(executor_ready(**(ready or {})), config=SchedulerConfig(**config))
        self.costs = COSTS
        self.token_times: dict[tuple[int, int], list[float]] = {}
        self.step_seconds: list[float] = []
        self._ends: deque[int] = deque()
        self._free_ns = 0
        self.engine.now_ns = SECOND

    @property
    def now_ns(self) -> int:
        return self.engine.now_ns

    @property
    def now(self) -> float:
        """Seconds."""
        return self.engine.now_ns * 1e-9

    def add(self, request: TokenizedRequest) -> RequestRefused | None:
        refused = self.engine.add(request)
        self._plan()
        return refused

    def advance(self, until: float | None = None) -> bool:
        """Up to the next result (False if there is none), or to a time that comes before it."""
        if not self._ends or (until is not None and self._ends[0] > until * SECOND):
            if until is not None:
                self.engine.now_ns = max(self.engine.now_ns, int(until * SECOND))
            return False
        self.engine.now_ns = max(self.engine.now_ns, self._ends.popleft())
        before = {key: len(choice.tokens) for key, choice in self.engine.choices.items()}
        self.engine.deliver()
        for key, choice in self.engine.choices.items():
            times = self.token_times.setdefault(key, [])
            times += [self.now] * (len(choice.tokens) - before.get(key, 0))
        self._plan()
        return True

    def run(self, until: float | None = None) -> None:
        """Until nothing is in flight, or to a time."""
        while self.advance(until):
            pass

    def gaps(self, request_id: int, choice: int = 0) -> list[float]:
        """Times between tokens."""
        times = self.token_times[request_id, choice]
        return [later - earlier for earlier, later in pairwise(times)]

    def _plan(self) -> None:
        engine = self.engine
        while engine.schedule() is not None:
            started = max(engine.now_ns, self._free_ns)
            seconds = self.costs.predict(StepShape.of(engine.executor.spans))
            self.step_seconds.append(seconds)
            self._free_ns = started + int(seconds * SECOND)
            engine.in_flight[-1] = msgspec.structs.replace(
                engine.in_flight[-1], received_ns=engine.now_ns, started_ns=started, sent_ns=self._free_ns
            )
            self._ends.append(self._free_ns)
