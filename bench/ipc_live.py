"""``ringserve bench ipc --live URL``: where a step's time goes in a running server, and what its rings carry.

The server stamps every step on its way (``ringserve_hop_seconds``) and counts in the rings' pages
(``ringserve_ring_*``); this module reads both before and after a short load, and subtracts.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from ringserve.bench.http_client import Endpoint
from ringserve.bench.report import document, write_json
from ringserve.options import OptionError

HOP = "ringserve_hop_seconds"
QUEUED = ("scheduler_to_executor_ring", "executor_wait")
"""Here a step waits for the one before it: two are in flight, so this is no time lost."""
PROMPT = "Write a long story about a ring, a doorbell and a pipe."


class LiveError(Exception):
    """The server cannot be measured; the message is for the user."""


class Hop(msgspec.Struct, frozen=True):
    """Time of a step's data in one place."""

    name: str
    count: int
    mean_us: float
    p50_us: float
    p99_us: float


class Ring(msgspec.Struct, frozen=True):
    """What one ring carried."""

    name: str
    messages: int
    bytes: int
    doorbells: int
    messages_per_token: float
    bytes_per_token: float
    doorbells_per_message: float


class Live(msgspec.Struct, frozen=True):
    """Everything that was read."""

    tokens: int
    steps: int
    hops: tuple[Hop, ...]
    rings: tuple[Ring, ...]
    outside_executor: float
    """Share of a step's time, from the start of the forward pass to the frontend, that is not the executor's."""
    executor_idle: float
    """Share of the executor's time with work to do in which it had no step: the gaps between steps."""
    messages_per_token: float
    bytes_per_token: float
    doorbells_per_message: float


Labels = tuple[tuple[str, str], ...]
Sample = dict[tuple[str, Labels], float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What it takes."""
    live = parser.add_argument_group("a running server")
    live.add_argument("--live", metavar="URL", help="measure this server instead, under a short load")
    live.add_argument("--concurrency", type=int, default=8, metavar="N", help="streams at once (default: %(default)s)")
    live.add_argument("--requests", type=int, default=16, metavar="N", help="default: %(default)s")
    live.add_argument("--max-tokens", type=int, default=64, metavar="N", help="of each (default: %(default)s)")
    live.add_argument("--api-key", metavar="KEY")


def run(given: argparse.Namespace, arguments: Sequence[str], console: Console) -> int:
    """Measure a server; returns the exit status.

    Raises:
        OptionError: not a URL, or numbers out of range.
    """
    try:
        endpoint = Endpoint.parse(given.live, given.api_key)
    except ValueError as error:
        raise OptionError(f"--live: {error}") from None
    for flag, value in (
        ("--concurrency", given.concurrency),
        ("--requests", given.requests),
        ("--max-tokens", given.max_tokens),
    ):
        if value < 1:
            raise OptionError(f"{flag}: {value} is below 1")
    try:
        with console.status(f"measuring {endpoint.url}"):
            live = asyncio.run(measure(endpoint, given.requests, given.concurrency, given.max_tokens))
    except (LiveError, httpx.HTTPError) as error:
        console.print(f"ringserve bench: error: {endpoint.url}: {error}", markup=False, style="red")
        return 1
    _print(console, live)
    if given.json:
        write_json(given.json, document(arguments, live=live))
    return 0


async def measure(endpoint: Endpoint, requests: int, concurrency: int, max_tokens: int) -> Live:
    """Read, load, read.

    Raises:
        LiveError: not a ringserve, or it refused.
        httpx.HTTPError: it cannot be reached.
    """
    headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
    metrics = f"{endpoint.scheme}://{endpoint.address}/metrics"
    async with httpx.AsyncClient(headers=headers, timeout=600.0, trust_env=False) as client:
        model = (await _get(client, f"{endpoint.url}/models")).json()["data"][0]["id"]
        body = {
            "model": model,
            "prompt": PROMPT,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        limit = asyncio.Semaphore(concurrency)

        async def one() -> None:
            async with limit, client.stream("POST", f"{endpoint.url}/completions", json=body) as answer:
                if answer.status_code != 200:
                    raise LiveError(f"HTTP {answer.status_code}: {(await answer.aread())[:200].decode()}")
                async for _ in answer.aiter_bytes():
                    pass

        await one()
        before = parse((await _get(client, metrics)).text)
        await asyncio.gather(*(one() for _ in range(requests)))
        after = parse((await _get(client, metrics)).text)
    return evaluate(difference(before, after))


async def _get(client: httpx.AsyncClient, url: str) -> httpx.Response:
    answer = await client.get(url)
    if answer.status_code != 200:
        raise LiveError(f"{url}: HTTP {answer.status_code}")
    return answer


def parse(text: str) -> Sample:
    """The exposition's samples by name and labels."""
    found: Sample = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def difference(before: Sample, after: Sample) -> Sample:
    """What happened in between."""
    return {key: value - before.get(key, 0.0) for key, value in after.items()}


def evaluate(delta: Sample) -> Live:
    """Figures from differences.

    Raises:
        LiveError: they are not a ringserve's, or nothing happened.
    """
    hops = tuple(_hop(delta, name) for name in _values_of(delta, f"{HOP}_count", "hop"))
    tokens = int(_total(delta, "vllm:generation_tokens_total"))
    if not hops or not tokens:
        raise LiveError("no ringserve: its /metrics tell nothing of hops or tokens")
    rings = tuple(_ring(delta, name, tokens) for name in _values_of(delta, "ringserve_ring_messages_total", "ring"))
    executor = next(hop.mean_us for hop in hops if hop.name == "executor")
    outside = sum(hop.mean_us for hop in hops if hop.name not in (*QUEUED, "executor"))
    messages = sum(ring.messages for ring in rings)
    idle = _total(delta, "ringserve_executor_idle_seconds_total")
    busy = _total(delta, "ringserve_executor_busy_seconds_total")
    return Live(
        tokens=tokens,
        steps=int(_total(delta, "ringserve_steps_total")),
        hops=hops,
        rings=rings,
        outside_executor=outside / (outside + executor),
        executor_idle=idle / (idle + busy) if busy else 0.0,
        messages_per_token=messages / tokens,
        bytes_per_token=sum(ring.bytes for ring in rings) / tokens,
        doorbells_per_message=sum(ring.doorbells for ring in rings) / messages if messages else 0.0,
    )


def _values_of(delta: Sample, name: str, label: str) -> list[str]:
    return list(dict.fromkeys(dict(labels)[label] for found, labels in delta if found == name))


def _total(delta: Sample, name: str, **labels: str) -> float:
    return sum(value for (found, given), value in delta.items() if found == name and labels.items() <= set(given))


def _hop(delta: Sample, name: str) -> Hop:
    count = _total(delta, f"{HOP}_count", hop=name)
    mean = _total(delta, f"{HOP}_sum", hop=name) / count if count else 0.0
    buckets: dict[float, float] = {}
    for (found, labels), value in delta.items():
        given = dict(labels)
        if found == f"{HOP}_bucket" and given["hop"] == name:
            buckets[float(given["le"])] = buckets.get(float(given["le"]), 0.0) + value
    return Hop(name, int(count), mean * 1e6, quantile(buckets, 0.5) * 1e6, quantile(buckets, 0.99) * 1e6)


def quantile(buckets: Mapping[float, float], share: float) -> float:
    """From cumulative counts by upper bound; linear inside a bucket, the last finite bound at most."""
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0.0
    if not total:
        return 0.0
    below_bound = below_count = 0.0
    for bound in bounds:
        if buckets[bound] >= share * total:
            if bound == float("inf"):
                return below_bound
            inside = buckets[bound] - below_count
            return below_bound + (bound - below_bound) * (share * total - below_count) / inside
        below_bound, below_count = bound, buckets[bound]
    return below_bound


def _ring(delta: Sample, name: str, tokens: int) -> Ring:
    messages, size, doorbells = (
        int(_total(delta, f"ringserve_ring_{what}_total", ring=name)) for what in ("messages", "bytes", "doorbells")
    )
    return Ring(
        name, messages, size, doorbells, messages / tokens, size / tokens, doorbells / messages if messages else 0.0
    )


def _print(console: Console, live: Live) -> None:
    table = Table(title="A step's way, microseconds", title_justify="left", box=None, padding=(0, 2, 0, 0))
    _columns(table, "", "mean", "p50", "p99")
    for hop in live.hops:
        waiting = " *" if hop.name in QUEUED else ""
        table.add_row(hop.name + waiting, *(f"{value:,.0f}" for value in (hop.mean_us, hop.p50_us, hop.p99_us)))
    console.print(table)
    console.print("* waits for the step before it: two are in flight, so this is no time lost", style="dim")
    if live.rings:
        table = Table(title="\nRings", title_justify="left", box=None, padding=(0, 2, 0, 0))
        _columns(table, "", "messages", "/token", "bytes/token", "doorbells/message")
        for ring in live.rings:
            row: tuple[Any, ...] = (ring.messages_per_token, ring.bytes_per_token, ring.doorbells_per_message)
            table.add_row(ring.name, f"{ring.messages:,}", *(f"{value:.2f}" for value in row))
        console.print(table)
    console.print(
        f"\n{live.tokens:,} tokens in {live.steps:,} steps: {live.messages_per_token:.2f} messages and "
        f"{live.bytes_per_token:.0f} bytes per token, {live.doorbells_per_message:.2f} doorbells per message; "
        f"{live.outside_executor:.2%} of a step outside the executor, which waits {live.executor_idle:.2%} of its time "
        "between steps",
        highlight=False,
    )


def _columns(table: Table, *names: str) -> None:
    for number, name in enumerate(names):
        table.add_column(name, justify="left" if number == 0 else "right", no_wrap=True)
