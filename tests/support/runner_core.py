"""The real scheduler in front of any runner, without actors: two steps in flight where the runner allows it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ringserve.config import SchedulerConfig
from ringserve.engine.runner import Runner
from ringserve.engine.scheduler import Scheduler
from ringserve.engine.scheduler_outputs import LogprobEntry, OutputBatch
from ringserve.engine.swap_space import SwapCosts
from ringserve.messages.columns import pack_i32
from ringserve.messages.logprobs import PromptLogprobs
from ringserve.messages.requests import RequestRefused, TokenizedRequest
from ringserve.messages.sampling import SamplingDefaults
from ringserve.messages.startup import ExecutorReady


def ready_of(
    vocab_size: int, max_model_len: int, num_pages: int, page_size: int, max_num_seqs: int, max_tokens: int
) -> ExecutorReady:
    """What an executor of these limits says; token 2 ends a sequence."""
    return ExecutorReady(
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=pack_i32([2]),
        num_pages=num_pages,
        page_size=page_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_tokens,
        dtype="float32",
        kv_dtype="float32",
        device="cuda",
        architecture="test",
        defaults=SamplingDefaults(),
        num_threads=1,
        load_seconds=0.0,
        model_impl="test",
        quantization="none",
        instructions="",
    )


@dataclass
class Came:
    """What one (request, choice) came to."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobEntry] = field(default_factory=list)
    reason: str | None = None
    message: str = ""


class RunnerCore:
    """One scheduler, one runner."""

    def __init__(
        self,
        runner: Runner,
        ready: ExecutorReady,
        config: SchedulerConfig | None = None,
        swap_costs: SwapCosts | None = None,
    ) -> None:
        self._runner = runner
        self.scheduler = Scheduler(ready, config, swap_costs=swap_costs)
        self._now = 1
        self.results: dict[tuple[int, int], Came] = {}
        self.prompt_logprobs: dict[int, list[PromptLogprobs]] = {}
        self.max_in_flight = 0
        """Seen."""

    def add(self, *requests: TokenizedRequest) -> None:
        """Queue requests; none may be refused."""
        for request in requests:
            for choice in range(request.n):
                self.results[request.request_id, choice] = Came()
            refused: RequestRefused | None = self.scheduler.add_request(request, self._now)
            assert refused is None, refused

    def turn(self) -> bool:
        """Plan and submit what may be, collect one result. False: nothing left to do."""
        self._now += 1
        runner = self._runner
        while runner.num_in_flight < runner.max_in_flight and (step := self.scheduler.schedule(self._now)) is not None:
            runner.submit(step)
        self.max_in_flight = max(self.max_in_flight, runner.num_in_flight)
        if not runner.num_in_flight:
            self._collect(self.scheduler.take_outputs())
            return False
        self._collect(self.scheduler.update_from_output(runner.collect(), self._now).outputs)
        return True

    def run(self, requests: Iterable[TokenizedRequest] = ()) -> dict[tuple[int, int], Came]:
        """Add requests and run until nothing is left."""
        self.add(*requests)
        while self.turn():
            pass
        assert self.scheduler.check_integrity() == []
        return self.results

    def _collect(self, batch: OutputBatch) -> None:
        for row in batch.rows:
            came = self.results[row.request_id, row.choice]
            came.token_ids += row.token_ids
            came.logprobs += row.logprobs
            if row.finish is not None:
                came.reason, came.message = row.finish.reason, row.finish.message
        for part in batch.prompt_logprobs:
            self.prompt_logprobs.setdefault(part.request_id, []).append(part)
