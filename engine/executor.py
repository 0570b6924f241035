"""The executor process: owns the weights, the KV pool's memory and the samplers; runs one step at a time.

    startup   threads -> weights -> self-check -> pool -> warm-up -> ExecutorReady
    loop      handle(SchedulerOutput) queues; act() runs one step and sends its result
    shutdown  nothing to save: everything here is soft state

It knows slots and steps, no request and no client. torch is imported inside ``startup``, after the environment that its
thread pools read is set. An exception in a step ends the process: the supervisor sees it, and nothing half-computed is
ever sent.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from ringserve.actor import ActorContext, BlockingActor
from ringserve.config import ExecutorSettings
from ringserve.engine.processors import usable_processors
from ringserve.messages import LoadProgress, Progress, SchedulerOutput, Started, StartFailed

if TYPE_CHECKING:
    from ringserve.engine.model_runner import ModelRunner

SCHEDULER = "scheduler"
"""The neighbour."""

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
        self._runner: ModelRunner | None = None

    def startup(self) -> None:
        """Load, check and warm up; on a model that cannot be served, tell the supervisor why and exit."""
        started = time.monotonic()
        self._progress("starting", 0.0)
        cores = usable_processors()
        threads = self._settings.config.threads or max(1, cores - 1)
        os.environ.update(THREAD_ENVIRONMENT, OMP_NUM_THREADS=str(threads))
        from ringserve.engine.executor_startup import build_engine, set_threads
        from ringserve.engine.model_error import ModelError

        set_threads(threads)
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
        """Run the oldest step. True while more are queued."""
        if not self._steps:
            return False
        step, received_ns = self._steps.popleft()
        if self._runner is None:
            raise RuntimeError("a step came before the model was loaded")
        try:
            result = self._runner.execute(step, received_ns)
        except Exception:
            logger.exception("step %d failed; the executor ends", step.step_id)
            raise
        self._to_scheduler.send(result)
        return bool(self._steps)

    def shutdown(self) -> None:
        self._steps.clear()
        if self._runner is not None:
            self._runner.close()
        self._runner = None

    def _progress(self, stage: str, fraction: float) -> None:
        self._context.report(Progress(stage, fraction))
        self._to_scheduler.send(LoadProgress(stage, fraction))
        self._context.flush_soon()


def create(context: ActorContext) -> BlockingActor:
    """The executor as an actor; its neighbour is the scheduler."""
    return Executor(context)
