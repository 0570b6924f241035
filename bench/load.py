"""Sends jobs at a pace and records what happens. Knows nothing of figures, tables or options."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ringserve.bench.bodies import BodyBuilder
from ringserve.bench.http_client import Exchange, HttpClient
from ringserve.bench.prompts import Job
from ringserve.bench.records import Failure, RequestRecord
from ringserve.bench.stream import StreamContent, http_failure, read_stream


@dataclass(frozen=True)
class ClosedLoop:
    """So many requests at once: the next is sent when one has ended."""

    concurrency: int
    ramp: float = 0.0
    """Seconds over which the concurrency grows to its full value."""


@dataclass(frozen=True)
class OpenLoop:
    """Requests at given times, whatever has become of the ones before."""

    times: Iterator[float]
    """Seconds after the start, ascending."""
    max_concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A job whose first body is ready, so that encoding takes no time during the run."""

    job: Job
    body: bytes


class LoadGenerator:
    """One run against one server."""

    def __init__(self, client: HttpClient, builder: BodyBuilder, *, timeout: float, think_time: float = 0.0) -> None:
        self.records: list[RequestRecord] = []
        self._client = client
        self._builder = builder
        self._timeout = timeout
        self._think_time = think_time
        self._tasks: set[asyncio.Task[None]] = set()
        self.stopped = False
        """By ``stop``."""

    def prepare(self, job: Job) -> Prepared:
        """Encode the first request of a job."""
        return Prepared(job, self._builder.body(job, 0))

    async def run(self, jobs: Iterator[Prepared], pace: ClosedLoop | OpenLoop, duration: float | None = None) -> None:
        """Until the jobs are used up and answered. After ``duration`` seconds no request is sent any more."""
        start = time.perf_counter()
        until = start + duration if duration is not None else None
        async with asyncio.TaskGroup() as group:

            def spawn(task: asyncio.Task[None]) -> None:
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

            match pace:
                case ClosedLoop(concurrency, ramp):
                    for index in range(concurrency):
                        delay = ramp * index / concurrency
                        spawn(group.create_task(self._work(jobs, delay, until)))
                case OpenLoop(times, max_concurrency):
                    free = asyncio.Semaphore(max_concurrency) if max_concurrency else None

                    def begin(prepared: Prepared, due: float) -> None:
                        spawn(group.create_task(self._converse(prepared, due, until, free)))

                    spawn(group.create_task(self._dispatch(jobs, times, start, until, begin)))

    def stop(self) -> None:
        """End the run now; what is in flight is recorded as interrupted."""
        self.stopped = True
        for task in list(self._tasks):
            task.cancel()

    async def _work(self, jobs: Iterator[Prepared], delay: float, until: float | None) -> None:
        if delay:
            await asyncio.sleep(delay)
        while not self.stopped and (until is None or time.perf_counter() < until):
            prepared = next(jobs, None)
            if prepared is None:
                return
            await self._take_turns(prepared, None, until)

    async def _dispatch(
        self,
        jobs: Iterator[Prepared],
        times: Iterator[float],
        start: float,
        until: float | None,
        begin: Callable[[Prepared, float], None],
    ) -> None:
        for prepared, at in zip(jobs, times, strict=False):
            due = start + at
            # Also where the schedule is ahead of us, the answers get their turn: they are what is measured.
            await asyncio.sleep(max(due - time.perf_counter(), 0.0))
            if until is not None and max(due, time.perf_counter()) >= until:
                return
            begin(prepared, due)

    async def _converse(
        self, prepared: Prepared, due: float, until: float | None, free: asyncio.Semaphore | None
    ) -> None:
        async with free or contextlib.nullcontext():
            await self._take_turns(prepared, due, until)

    async def _take_turns(self, prepared: Prepared, due: float | None, until: float | None) -> None:
        job, body, answers = prepared.job, prepared.body, list[str]()
        for turn, asked in enumerate(job.turns):
            pause = self._think_time if turn else 0.0
            if until is not None and time.perf_counter() + pause >= until:
                return
            if pause:
                await asyncio.sleep(pause)
            if turn:
                body, due = self._builder.body(job, turn, answers), None
            known = len(asked.prompt) if isinstance(asked.prompt, list) else None
            exchange = Exchange(time.perf_counter())
            try:
                await self._client.post(self._builder.route, body, self._timeout, exchange)
            except asyncio.CancelledError:
                exchange.failure = Failure("interrupted", "the run was stopped")
                exchange.ended = time.perf_counter()
                self.records.append(to_record(exchange, StreamContent(), due, known, turn))
                raise
            content = read_stream(exchange.reads) if exchange.status == 200 else StreamContent()
            record = to_record(exchange, content, due, known, turn)
            self.records.append(record)
            if record.failure:
                return
            answers.append("".join(content.texts))


def to_record(
    exchange: Exchange, content: StreamContent, due: float | None, prompt_tokens: int | None, turn: int
) -> RequestRecord:
    """What an exchange amounts to."""
    failure = exchange.failure
    if failure is None and exchange.status != 200:
        failure = http_failure(exchange.status, exchange.body(), exchange.location)
    failure = failure or content.failure
    if failure is None and not content.ended:
        failure = Failure("truncated", "the stream ended without a finish reason or [DONE]")
    if failure is None and not content.chunk_times:
        failure = Failure("empty", "the stream ended without any output")
    good_end = content.last_time if failure is None else None
    return RequestRecord(
        due=exchange.sent if due is None else due,
        sent=exchange.sent,
        chunk_times=content.chunk_times,
        chunk_tokens=content.chunk_tokens,
        ended=exchange.ended if good_end is None else good_end,
        asked_prompt_tokens=prompt_tokens,
        usage=content.usage,
        finish_reason=content.finish_reason,
        failure=failure,
        turn=turn,
    )
