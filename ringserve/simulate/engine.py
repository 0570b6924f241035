"""One simulated run: client, scheduler and executor on a virtual clock that jumps from event to event.

The scheduler is the server's own, with as many steps in flight. Nothing sleeps, nothing is random: the same load gives
the same figures on every machine.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from ringserve.config import SchedulerConfig
from ringserve.engine.scheduler import Scheduler
from ringserve.engine.scheduler_outputs import OutputBatch
from ringserve.messages.sampling import SamplingDefaults
from ringserve.messages.startup import ExecutorReady
from ringserve.messages.stats import EngineStats
from ringserve.simulate.client import Client, SentRequest
from ringserve.simulate.executor import SimulatedExecutor
from ringserve.simulate.step_time import Engine, StepTime

Observer = Callable[[Scheduler], None]
"""Called after every step's result."""


@dataclass(frozen=True)
class Outcome:
    """Everything that came of a run."""

    requests: list[SentRequest]
    gaps: array[float]
    """Seconds between neighbouring tokens of the same answer."""
    stats: EngineStats
    busy_s: float
    num_rows: int
    wall_s: float
    """What the simulation itself took, on this machine's clock."""


def simulate(
    engine: Engine,
    config: SchedulerConfig,
    step_time: StepTime,
    client: Client,
    observe: Observer | None = None,
) -> Outcome:
    """Run until every request has ended.

    Raises:
        RuntimeError: requests wait and nothing will ever happen (a fault of the scheduler).
    """
    started = time.perf_counter()
    run = _Run(engine, config, step_time, client)
    run.loop(observe)
    return Outcome(
        requests=run.requests,
        gaps=run.gaps,
        stats=run.scheduler.stats(),
        busy_s=run.executor.busy_ns * 1e-9,
        num_rows=run.executor.num_rows,
        wall_s=time.perf_counter() - started,
    )


class _Run:
    def __init__(self, engine: Engine, config: SchedulerConfig, step_time: StepTime, client: Client) -> None:
        self.scheduler = Scheduler(executor_ready(engine), config)
        self.executor = SimulatedExecutor(engine.max_num_seqs, step_time)
        self.client = client
        self.requests: list[SentRequest] = []
        self.gaps: array[float] = array("f")
        self._live: dict[int, SentRequest] = {}

    def loop(self, observe: Observer | None) -> None:
        scheduler, executor, client = self.scheduler, self.executor, self.client
        now_ns = 1  # 0 is "not yet" in the scheduler's books
        while True:
            while (step := scheduler.schedule(now_ns)) is not None:
                executor.submit(step, now_ns)
            for refused in scheduler.take_refusals():
                self._end(self._live.pop(refused.request_id), now_ns, refused.code or refused.message)
            result_ns, arrival_ns = executor.next_ns, client.next_ns
            if arrival_ns is not None and (result_ns is None or arrival_ns <= result_ns):
                now_ns = max(now_ns, arrival_ns)
                self._add_requests(now_ns)
            elif result_ns is not None:
                now_ns = result_ns
                result = scheduler.update_from_output(executor.take_result(), now_ns)
                self._on_outputs(result.outputs, now_ns)
                if observe is not None:
                    observe(scheduler)
            elif self._live:
                raise RuntimeError(f"{len(self._live)} requests wait for ever: {scheduler.stats()}")
            else:
                return

    def _add_requests(self, now_ns: int) -> None:
        for message, sent in self.client.take_due(now_ns):
            self.requests.append(sent)
            refused = self.scheduler.add_request(message, now_ns)
            if refused is not None:
                self._end(sent, now_ns, refused.code or refused.message)
            else:
                self._live[message.request_id] = sent
        self._on_outputs(self.scheduler.take_outputs(), now_ns)

    def _on_outputs(self, outputs: OutputBatch, now_ns: int) -> None:
        live, gaps = self._live, self.gaps
        for row in outputs.rows:
            sent = live[row.request_id]
            if row.token_ids:
                if sent.first_token_ns < 0:
                    sent.first_token_ns = now_ns
                else:
                    gaps.append((now_ns - sent.last_token_ns) * 1e-9)
                sent.last_token_ns = now_ns
                sent.num_output_tokens += len(row.token_ids)
                if sent.answer is not None:
                    sent.answer.extend(row.token_ids)
            if row.start is not None:
                sent.num_cached_tokens = row.start.num_cached_tokens
            if row.finish is not None:
                del live[row.request_id]
                failed = "" if row.finish.reason in ("stop", "length") else row.finish.message or row.finish.reason
                self._end(sent, now_ns, failed)

    def _end(self, sent: SentRequest, now_ns: int, refused: str) -> None:
        sent.ended_ns = now_ns
        sent.refused = refused
        self.client.on_end(sent)


def executor_ready(engine: Engine) -> ExecutorReady:
    """What an executor of this size tells the scheduler."""
    return ExecutorReady(
        vocab_size=1 << 20,
        max_model_len=engine.max_model_len,
        eos_token_ids=b"",
        num_pages=engine.num_pages,
        page_size=engine.page_size,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        dtype="none",
        kv_dtype="none",
        device="simulated",
        architecture="simulated",
        defaults=SamplingDefaults(),
    )
