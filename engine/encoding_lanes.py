"""Work in worker threads, in order per lane.

One lane per frontend. A lane runs one job at a time; what follows waits, whether it needs a thread or not, so that an
Abort never overtakes its request. Everything but ``work`` runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Job(Generic[T]):
    """``done(work())``, with ``work`` in a thread unless it is short."""

    work: Callable[[], T]
    done: Callable[[T], None]
    dropped: Callable[[], bool] = lambda: False
    """Asked on the loop before and after ``work``: True ends the job without ``done``."""
    short: bool = True
    """Takes well under a millisecond: runs on the loop's thread if nothing waits before it."""


class EncodingLanes:
    """The lanes of one process.

    Args:
        threads: where work runs.
        on_completed: called on the loop after jobs that had waited for a thread are done, with the exception that one
            of them raised, if any (a fault: refusals are results).
    """

    def __init__(self, threads: Executor, on_completed: Callable[[BaseException | None], None]) -> None:
        self._threads = threads
        self._on_completed = on_completed
        self._lanes: dict[str, deque[Job[Any]]] = {}

    def submit(self, lane: str, job: Job[Any]) -> None:
        """Run a job after all earlier ones of its lane; at once if there are none and it is short."""
        waiting = self._lanes.get(lane)
        if waiting is not None:
            waiting.append(job)
        elif job.short:
            job.done(job.work())
        else:
            self._lanes[lane] = deque([job])
            self._advance(lane)

    def then(self, lane: str, action: Callable[[], None]) -> None:
        """Call ``action`` on the loop's thread when all earlier jobs of the lane are done."""
        self.submit(lane, Job(_nothing, lambda _: action()))

    def _advance(self, lane: str) -> None:
        """Give the lane's first job that needs it to a thread; end the lane if none is left."""
        waiting = self._lanes[lane]
        while waiting:
            job = waiting[0]
            if job.dropped():
                waiting.popleft()
            elif job.work is _nothing:
                waiting.popleft()
                job.done(None)
            else:
                self._threads.submit(job.work).add_done_callback(
                    partial(self._hand_over, asyncio.get_running_loop(), lane)
                )
                return
        del self._lanes[lane]

    def _hand_over(self, loop: asyncio.AbstractEventLoop, lane: str, future: Future[Any]) -> None:
        """Called in the worker's thread."""
        if not future.cancelled():
            loop.call_soon_threadsafe(self._completed, lane, future)

    def _completed(self, lane: str, future: Future[Any]) -> None:
        failure: BaseException | None = None
        try:
            job = self._lanes[lane].popleft()
            if not job.dropped():
                job.done(future.result())
            self._advance(lane)
        except BaseException as error:
            failure = error
        self._on_completed(failure)


def _nothing() -> None:
    """The work of a job that only waits for its turn."""
