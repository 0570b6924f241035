"""An engine of a real scheduler and an executor without a model, for the scheduler's tests."""

from __future__ import annotations

from collections import deque

import msgspec
from collected_outputs import Collected, collect
from fake_executor import FakeExecutor
from simulated_tokens import run_alone

from ringserve.config import SchedulerConfig
from ringserve.engine.scheduler import Scheduler
from ringserve.engine.scheduler_outputs import OutputBatch, pack_token_outputs
from ringserve.engine.swap_space import SwapCosts
from ringserve.messages.logprobs import PromptLogprobs
from ringserve.messages.requests import RequestRefused, TokenizedRequest
from ringserve.messages.startup import ExecutorReady
from ringserve.messages.stats import StepTimes
from ringserve.messages.steps import ModelRunnerOutput, SchedulerOutput
from ringserve.messages.token_outputs import TokenOutputs


class Engine:
    """A scheduler and its executor; every call checks the books."""

    def __init__(
        self, ready: ExecutorReady, max_steps_in_flight: int = 2, config: SchedulerConfig | None = None
    ) -> None:
        self.ready = ready
        # Steps take next to no time here; what a swap costs whatever its size would always be more.
        costs = SwapCosts(ready.bytes_per_page, ready.swap_bytes_per_second, seconds_per_swap=0.0)
        self.scheduler = Scheduler(ready, config, max_steps_in_flight, swap_costs=costs)
        self.executor = FakeExecutor(ready)
        self.steps: list[SchedulerOutput] = []
        self.in_flight: deque[ModelRunnerOutput] = deque()
        self.choices: dict[tuple[int, int], Collected] = {}
        self.prompt_logprobs: list[PromptLogprobs] = []
        self.refusals: list[RequestRefused] = []
        """Of requests that were queued."""
        self.now_ns = 1000

    @property
    def max_model_len(self) -> int:
        return min(self.ready.max_model_len, self.ready.num_pages * self.ready.page_size)

    def add(self, request: TokenizedRequest) -> RequestRefused | None:
        refused = self.scheduler.add_request(request, self._tick())
        self._take(self.scheduler.take_outputs(), None)
        return refused

    def abort(self, request_id: int, choice: int = -1, reason: str = "abort") -> None:
        self.scheduler.abort(request_id, choice, "stop" if reason == "stop" else "abort")
        self._take(self.scheduler.take_outputs(), None)

    def schedule(self) -> SchedulerOutput | None:
        """Plan a step and have it computed; its result waits for ``deliver``."""
        step = self.scheduler.schedule(self._tick())
        self.refusals += self.scheduler.take_refusals()
        if step is not None:
            step = msgspec.msgpack.decode(msgspec.msgpack.encode(step), type=SchedulerOutput)
            self.steps.append(step)
            self.in_flight.append(self.executor.execute(step))
        self._check()
        return step

    def deliver(self) -> bool:
        """Hand the scheduler the oldest result; False if there is none."""
        if not self.in_flight:
            return False
        result = self.scheduler.update_from_output(self.in_flight.popleft(), self._tick())
        self._take(result.outputs, result.times)
        return True

    def run(self) -> None:
        """Until nothing is left, as far ahead as allowed."""
        while True:
            while self.schedule() is not None:
                pass
            if not self.deliver():
                break
        assert not self.scheduler.has_work, f"stuck: {self.scheduler.stats()}"

    def check_empty(self) -> None:
        """Nothing is held any more."""
        assert not self.in_flight
        stats = self.scheduler.stats()
        assert stats.num_free_pages == stats.num_pages == self.ready.num_pages
        assert (stats.num_swapped_pages, stats.num_host_pages) == (0, self.ready.num_host_pages)
        assert (stats.swapped_out_pages, stats.swapped_in_pages) == (self.executor.pages_out, self.executor.pages_in)
        assert stats.swapped_in_tokens == self.executor.tokens_in
        assert stats.num_computed_tokens == self.executor.computed_tokens
        assert (stats.num_running, stats.num_waiting, self.scheduler.num_requests) == (0, 0, 0)
        assert self.scheduler.num_free_slots == self.ready.max_num_seqs

    def check_alone(self, request: TokenizedRequest) -> None:
        """Every choice of the request yielded what it yields alone."""
        for choice in range(request.n):
            assert self.choices[request.request_id, choice].end == run_alone(request, choice, self.max_model_len)
            assert len(self.choices[request.request_id, choice].starts) == 1

    def _tick(self) -> int:
        self.now_ns += 1
        return self.now_ns

    def _take(self, outputs: OutputBatch, times: StepTimes | None) -> None:
        message = pack_token_outputs(outputs, times, self.scheduler.stats(), self.now_ns)
        message = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=TokenOutputs)
        collect(message, self.choices)
        self.prompt_logprobs += message.prompt_logprobs
        self._check()

    def _check(self) -> None:
        assert self.scheduler.check_integrity() == []
