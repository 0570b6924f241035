"""The executor process: owns the weights, the KV pool's memory and the samplers; runs one step at a time.

    startup   threads -> weights -> self-check -> pool -> warm-up -> ExecutorReady
    loop      handle(SchedulerOutput) queues; act() submits steps, and collects and sends a result
    shutdown  nothing to save: everything here is soft state

On the CPU a step is computed as it is submitted. A GPU computes one while the next is launched: act() never waits for a
result as long as another step may come.

It knows slots and steps, no request and no client. torch is imported inside ``startup``, after the environment that its
thread pools read is set. An exception in a step ends the process: the supervisor sees it, and nothing half-computed is
ever sent.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ringserve.actor import ActorContext, BlockingActor
from ringserve.config import ExecutorSettings
from ringserve.engine.processors import usable_processors
from ringserve.messages.startup import LoadProgress, Progress, Started, StartFailed
from ringserve.messages.steps import SchedulerOutput

if TYPE_CHECKING:
    from ringserve.engine.runner import Runner

SCHEDULER = "scheduler"
"""The neighbour."""

POLL_SECONDS = 20e-6
"""Between two looks at a device whose result is awaited: little beside a step, and the processor is not kept busy."""

THREAD_ENVIRONMENT = {
    # A step has hundreds of parallel regions: threads that sleep between them halve its speed (2 threads, 1 sequence:
    # 13 instead of 22 tokens/s). Some tens of microseconds are enough, and soon over when there is nothing to compute.
    "GOMP_SPINCOUNT": "20000",
    "KMP_BLOCKTIME": "0",
    "THP_MEM_ALLOC_ENABLE": "1",  # torch asks for huge pages: weights are mapped several times faster
    "TOKENIZERS_PARALLELISM": "false",
}
"""Instructions to the libraries of this process, read when they are loaded."""

logger = logging.getLogger("ringserve.executor")


class Executor:
    """See the module."""

    def __init__(self, context: ActorContext) -> None:
        self._settings: ExecutorSettings = context.settings
        self._context = context
        self._to_scheduler = context.outboxes[SCHEDULER]
        self._steps: deque[tuple[SchedulerOutput, int]] = deque()
        """Steps to run, each with the time it came."""
        self._in_flight: deque[int] = deque()
        """Ids of the steps submitted."""
        self._runner: Runner | None = None

    def startup(self) -> None:
        """Load, check and warm up; on a model that cannot be served, tell the supervisor why and exit."""
        started = time.monotonic()
        self._progress("starting", 0.0)
        cores = usable_processors()
        threads = self._settings.config.threads or max(1, cores - 1)
        os.environ.update(THREAD_ENVIRONMENT, OMP_NUM_THREADS=str(threads))
        from ringserve.engine.executor_startup import build_engine
        from ringserve.engine.model_error import ModelError

        try:
            # The fast path's team does not suffer from a core that others use as well.
            engine = build_engine(self._settings, threads, self._settings.config.threads or cores, self._progress)
        except ModelError as error:
            self._context.report(StartFailed(str(error)))
            raise SystemExit(1) from error
        self._runner = engine.runner
        ready = engine.ready(time.monotonic() - started)
        self._to_scheduler.send(ready)
        self._context.report(
            Started(
                {
                    "dtype": ready.dtype,
                    "kv_dtype": ready.kv_dtype,
                    "model_impl": ready.model_impl,
                    "quantization": ready.quantization,
                    "instructions": ready.instructions,
                    "device": ready.device,
                    "threads": ready.num_threads,
                    "kv_tokens": ready.num_pages * ready.page_size,
                    "architecture": ready.architecture,
                    "load_seconds": round(ready.load_seconds, 2),
                }
            )
        )

    def handle(self, message: Any, source: str) -> None:
        match message:
            case SchedulerOutput():
                self._steps.append((message, time.monotonic_ns()))
            case _:
                raise TypeError(f"the executor takes no {type(message).__name__} (from {source})")

    def act(self) -> bool:
        """Submit what may be submitted, then send the oldest result if there is one or no more steps can come before
        it. True while there is more to do."""
        if self._runner is None:
            if self._steps:
                raise RuntimeError("a step came before the model was loaded")
            return False
        while self._steps and len(self._in_flight) < self._runner.max_in_flight:
            step, received_ns = self._steps.popleft()
            self._in_flight.append(step.step_id)
            with self._ends_on_failure(step.step_id):
                self._runner.submit(step, received_ns)
        if not self._in_flight:
            return False
        with self._ends_on_failure(self._in_flight[0]):
            if len(self._in_flight) == self._runner.max_in_flight or self._runner.is_ready():
                self._to_scheduler.send(self._runner.collect())
                self._in_flight.popleft()
            else:
                # Another step may come, and is to be launched before this one ends. Its ring is looked at between.
                time.sleep(POLL_SECONDS)
        return bool(self._steps or self._in_flight)

    def shutdown(self) -> None:
        self._steps.clear()
        self._in_flight.clear()
        if self._runner is not None:
            self._runner.close()
        self._runner = None

    @contextmanager
    def _ends_on_failure(self, step_id: int) -> Iterator[None]:
        try:
            yield
        except Exception:
            logger.exception("step %d failed; the executor ends", step_id)
            raise

    def _progress(self, stage: str, fraction: float) -> None:
        self._context.report(Progress(stage, fraction))
        self._to_scheduler.send(LoadProgress(stage, fraction))
        self._context.flush_soon()


def create(context: ActorContext) -> BlockingActor:
    """The executor as an actor; its neighbour is the scheduler."""
    return Executor(context)
