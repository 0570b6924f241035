"""One run at one point: warm-up, load, figures, use of the machine. Ctrl-C ends it early with what there is."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import time
from collections.abc import Callable, Iterator
from itertools import islice

import msgspec
import uvloop
from rich.progress import Progress

from ringserve.bench.bodies import BodyBuilder
from ringserve.bench.http_client import Endpoint, Exchange, HttpClient
from ringserve.bench.load import ClosedLoop, LoadGenerator, Prepared
from ringserve.bench.load_options import LoadOptions, Point
from ringserve.bench.metrics import Metrics, compute
from ringserve.bench.processes import ProcessTree, is_local
from ringserve.bench.prompts import Job
from ringserve.bench.records import RequestRecord
from ringserve.bench.stream import http_failure
from ringserve.bench.system_use import SystemUse, SystemWatch


class ServerUnusable(Exception):
    """Nothing to measure; the message is for the user."""


class Run(msgspec.Struct, kw_only=True):
    """One point's result."""

    point: Point
    metrics: Metrics
    system: SystemUse
    retried: int
    """Requests sent again because the server had closed an idle connection."""
    stopped: bool
    """By the user."""
    records: list[RequestRecord] | None = None
    """Raw time stamps, where asked for."""


def measure(
    endpoint: Endpoint,
    model: str,
    options: LoadOptions,
    point: Point,
    *,
    seed: str,
    server: ProcessTree | None,
    progress: Progress | None = None,
) -> Run:
    """Run the load at ``point``; blocks until it is over.

    Raises:
        DatasetError: the prompts' file is not what it should be.
    """
    return uvloop.run(_measure(endpoint, model, options, point, seed, server, progress))


async def _measure(
    endpoint: Endpoint,
    model: str,
    options: LoadOptions,
    point: Point,
    seed: str,
    server: ProcessTree | None,
    progress: Progress | None,
) -> Run:
    _allow_many_connections()
    loop = asyncio.get_running_loop()
    client = HttpClient(endpoint)
    builder = options.builder(model)
    generator = LoadGenerator(client, builder, timeout=options.timeout, think_time=options.think_time)
    warmer = LoadGenerator(client, builder, timeout=options.timeout)
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        warmer.stop()
        generator.stop()
        loop.remove_signal_handler(signal.SIGINT)  # a second Ctrl-C ends the command

    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        jobs, count = await _prepared(options, point, seed, generator)
        if options.warmup and not stopped:
            warm_jobs = map(warmer.prepare, islice(options.jobs(f"{seed} warm-up"), options.warmup))
            await warmer.run(warm_jobs, ClosedLoop(min(options.warmup, point.concurrency or 8)))
        watch = SystemWatch(server, elsewhere=server is None and not is_local(endpoint.host))
        ticker = asyncio.create_task(_tick(watch, generator, progress, f"{point}", count, options.duration))
        if not stopped:
            await generator.run(jobs, options.pace(point, seed), options.duration)
        client.close()
        await asyncio.sleep(0)  # the connections are closed now: there are descriptors again to read /proc with
        system = watch.finish()
        ticker.cancel()
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        client.close()
    records = generator.records
    return Run(
        point=point,
        metrics=compute(records, options.objectives),
        system=system,
        retried=client.num_retries,
        stopped=stopped,
        records=records if options.keep_records else None,
    )


def _allow_many_connections() -> None:
    """Raise the soft limit of open descriptors, 1,024 on most systems, to the hard one: each request needs one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _prepared(
    options: LoadOptions, point: Point, seed: str, generator: LoadGenerator
) -> tuple[Iterator[Prepared], int | None]:
    """(jobs, how many requests): encoded before the run, except where only a duration limits their number.

    A long trace takes its time: Ctrl-C is looked for in between.
    """
    jobs = map(generator.prepare, options.jobs(seed))
    number = options.number_of_jobs(point)
    if number is None and options.duration is not None:
        return jobs, None
    ready: list[Prepared] = []
    for prepared in islice(jobs, number):
        ready.append(prepared)
        if len(ready) % 64 == 0:
            await asyncio.sleep(0)
            if generator.stopped:
                break
    return iter(ready), sum(len(prepared.job.turns) for prepared in ready)


async def _tick(
    watch: SystemWatch,
    generator: LoadGenerator,
    progress: Progress | None,
    title: str,
    count: int | None,
    duration: float | None,
) -> None:
    """Twice a second the progress bar, once a second the server's memory."""
    start = time.perf_counter()
    task = progress.add_task(title, total=duration if count is None else count) if progress else None
    for number in range(1 << 62):
        await asyncio.sleep(0.5)
        if number % 2:
            watch.sample()
        if progress is not None and task is not None:
            done = len(generator.records)
            completed = done if count is not None else time.perf_counter() - start
            progress.update(task, completed=completed, description=f"{title}: {done} requests", refresh=True)


def ask_once(endpoint: Endpoint, builder: BodyBuilder, job: Job, timeout: float) -> RequestRecord:
    """One request on a connection of its own."""
    return uvloop.run(_ask_once(endpoint, builder, job, timeout))


async def _ask_once(endpoint: Endpoint, builder: BodyBuilder, job: Job, timeout: float) -> RequestRecord:
    client = HttpClient(endpoint)
    generator = LoadGenerator(client, builder, timeout=timeout)
    await generator.run(iter([generator.prepare(job)]), ClosedLoop(1))
    client.close()
    return generator.records[0]


def find_model(
    endpoint: Endpoint, *, wait: float = 0.0, timeout: float = 10.0, check: Callable[[], None] = lambda: None
) -> str:
    """The first model that the server lists, waiting up to ``wait`` seconds for it to be ready.

    ``check`` may raise between two looks, for example when the server has died.

    Raises:
        ServerUnusable: no list of models.
    """
    return uvloop.run(_find_model(endpoint, wait, timeout, check))


async def _find_model(endpoint: Endpoint, wait: float, timeout: float, check: Callable[[], None]) -> str:
    client = HttpClient(endpoint)
    deadline = time.perf_counter() + wait
    try:
        while True:
            check()
            exchange = await client.get(f"{endpoint.path}/models", timeout)
            if exchange.status == 200 and exchange.failure is None:
                return _first_model(endpoint, exchange)
            failure = exchange.failure or http_failure(exchange.status, exchange.body(), exchange.location)
            if time.perf_counter() >= deadline or failure.kind not in _NOT_READY:
                raise ServerUnusable(f"{endpoint.url}/models: {failure.kind.replace('_', ' ')}: {failure.message}")
            await asyncio.sleep(0.02)
    finally:
        client.close()


def _first_model(endpoint: Endpoint, exchange: Exchange) -> str:
    try:
        return str(msgspec.json.decode(exchange.body())["data"][0]["id"])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, IndexError, TypeError):
        raise ServerUnusable(
            f"{endpoint.url}/models: not an OpenAI list of models; give the name with --model"
        ) from None


_NOT_READY = ("connection_refused", "connection_reset", "disconnected", "http_503", "http_502", "timeout")
