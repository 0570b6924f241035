"""The measurement itself: interleaved rounds over all cells and transports, in a new order each round."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec

from ringserve.bench import ipc_engine, ipc_loop
from ringserve.bench.ipc_handlers import NAMES, Content, without_transport_us
from ringserve.bench.ipc_messages import pin_all_threads
from ringserve.bench.ipc_pair import Pair, Throughput, median, percentile
from ringserve.bench.ipc_results import Bound, Idle, Latency, Placement, Rate, Results, with_ratios

T = TypeVar("T")

GAP = 0.001
LARGE = 128 * 1024
"""From here on fewer messages are as good."""
WARM_UP = 20


class Plan(msgspec.Struct, kw_only=True, frozen=True):
    """What to measure, and how often."""

    transports: tuple[str, ...]
    sizes: tuple[int, ...] = (64, 1024, 16 * 1024, 512 * 1024)
    rounds: int = 3
    samples: int = 400
    """Of each busy cell and round; an idle one gets a quarter."""
    messages: int = 10_000
    """Of each throughput cell and round, fewer of large ones."""
    idle_seconds: float = 3.0
    families: tuple[str, ...] = ("one-way", "throughput", "idle", "uvloop", "engine")
    seed: int = 0


Key = tuple[str, Placement, int, str]  # family, placement, size, transport
OnStep = Callable[[str], None]


class Measurement:
    """Collects rounds; ``results`` at the end."""

    def __init__(self, plan: Plan, on_step: OnStep) -> None:
        self._plan = plan
        self._on_step = on_step
        self._rng = random.Random(plan.seed)
        self._latencies: dict[Key, list[list[float]]] = defaultdict(list)
        self._rates: dict[Key, list[Throughput]] = defaultdict(list)
        self._idle: list[Idle] = []
        self._codec_us: dict[str, list[float]] = defaultdict(list)
        self._cpus = sorted(os.sched_getaffinity(0))

    def run(self) -> Results:
        """Measure everything the plan names; affinities are put back."""
        families = set(self._plan.families)
        try:
            if families & {"one-way", "throughput", "idle"}:
                self._pairs(families)
            if "uvloop" in families:
                self._loops()
            if "engine" in families:
                self._engine()
        finally:
            pin_all_threads(self._cpus)
        return with_ratios(
            Results(
                latencies=list(self._latency_cells()),
                rates=list(self._rate_cells()),
                idle=self._idle,
                bounds=list(self._bounds()),
            )
        )

    # ---------------------------------------------------------------------------------------- two blocking processes

    def _pairs(self, families: set[str]) -> None:
        pairs: list[Pair] = []
        try:
            for transport in self._plan.transports:
                self._on_step(f"starting {transport}")
                pairs.append(Pair(transport))
                pairs[-1].place(self._cpus, self._cpus)
                for size in self._plan.sizes:
                    pairs[-1].latency(size, WARM_UP, 0.0)
            for number in range(self._plan.rounds):
                if "one-way" in families:
                    self._one_way(pairs, number)
                if "throughput" in families:
                    self._throughput(pairs, number)
            if "idle" in families:
                self._idle_cost(pairs)
        finally:
            for pair in pairs:
                pair.close()

    def _one_way(self, pairs: list[Pair], number: int) -> None:
        plan = self._plan
        for placement, near, far in self._placements():
            for mode, gap, samples in (("busy", 0.0, plan.samples), ("idle", GAP, max(1, plan.samples // 4))):
                if mode == "idle" and placement == "shared":
                    continue
                self._on_step(f"round {number + 1}: one way, {mode}, {placement}")
                for size in plan.sizes:
                    count = max(1, samples // 4) if size >= LARGE and mode == "busy" else samples
                    for pair in self._shuffled(pairs):
                        pair.place(near, far)
                        pair.latency(size, min(count, WARM_UP), 0.0)
                        self._latencies[mode, placement, size, pair.transport].append(pair.latency(size, count, gap))

    def _throughput(self, pairs: list[Pair], number: int) -> None:
        self._on_step(f"round {number + 1}: throughput")
        for size in self._plan.sizes:
            count = max(1, self._plan.messages // (1 if size < 8192 else 5 if size < LARGE else 100))
            for pair in self._shuffled(pairs):
                pair.place(self._cpus, self._cpus)
                self._rates["throughput", "unpinned", size, pair.transport].append(pair.throughput(size, count))

    def _idle_cost(self, pairs: list[Pair]) -> None:
        self._on_step(f"idle for {self._plan.idle_seconds:g} s")
        time.sleep(0.2)
        before = [pair.use() for pair in pairs]
        time.sleep(self._plan.idle_seconds)
        for pair, then in zip(pairs, before, strict=True):
            now = pair.use()
            self._idle.append(
                Idle(
                    pair.transport,
                    self._plan.idle_seconds,
                    round(now.cpu_ms - then.cpu_ms, 4),
                    now.context_switches - then.context_switches,
                )
            )

    # ----------------------------------------------------------------------------------------------- two event loops

    def _loops(self) -> None:
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._on_loops())

    async def _on_loops(self) -> None:
        plan = self._plan
        names = [name for name in ipc_loop.available() if name in plan.transports]
        pairs = [ipc_loop.LoopPair(name) for name in names]
        for pair in pairs:
            pair.start()
            await pair.latency(64, WARM_UP)
        for number in range(plan.rounds):
            self._on_step(f"round {number + 1}: uvloop")
            for placement, near, far in self._placements():
                for pair in self._shuffled(pairs):
                    await pair.place(near, far)
                    key: Key = ("uvloop", placement, 64, pair.transport)
                    self._latencies[key].append(await pair.latency(64, plan.samples))
                    if placement == "unpinned":
                        rate = await pair.throughput(64, plan.messages)
                        self._rates[key].append(Throughput(rate, 0.0, 0.0))
        for pair in pairs:
            await pair.close()

    # ------------------------------------------------------------------------------------------------------- six hops

    def _engine(self) -> None:
        plan = self._plan
        pin_all_threads(self._cpus)
        contents: tuple[Content, ...] = ("small", "engine")
        names = [name for name in ipc_engine.available() if name in plan.transports]
        for content in contents:
            paths: list[ipc_engine.Path] = []
            try:
                for name in names:
                    paths.append(ipc_engine.Path(name, content))
                    paths[-1].round_trips(WARM_UP, 1)
                for number in range(plan.rounds):
                    self._on_step(f"round {number + 1}: six hops, {content} messages")
                    self._codec_us[content].append(without_transport_us(content, plan.samples))
                    for path in self._shuffled(paths):
                        key: Key = (content, "unpinned", 0, path.transport)
                        times, _, _ = path.round_trips(plan.samples, 1)
                        self._latencies[key].append(times)
                        _, rate, doorbells = path.round_trips(max(32, plan.messages // 3), 32)
                        self._rates[key].append(Throughput(rate, 0.0, doorbells))
            finally:
                for path in paths:
                    path.close()

    # ---------------------------------------------------------------------------------------------------------- cells

    def _placements(self) -> Iterator[tuple[Placement, Sequence[int], Sequence[int]]]:
        cpus = self._cpus
        yield "unpinned", cpus, cpus
        yield "shared", cpus[:1], cpus[:1]
        if len(cpus) > 1:
            yield "separate", cpus[:1], cpus[-1:]

    def _shuffled(self, things: list[T]) -> list[T]:
        return self._rng.sample(things, len(things))

    def _latency_cells(self) -> Iterator[Latency]:
        for (family, placement, size, transport), rounds in self._latencies.items():
            values = sorted(value for values in rounds for value in values)
            yield Latency(
                family=family,
                placement=placement,
                size=size,
                transport=transport,
                samples=len(values),
                p50_us=_rounded(percentile(values, 0.5)),
                p99_us=_rounded(percentile(values, 0.99)),
                p999_us=_rounded(percentile(values, 0.999)),
                rounds_p50_us=tuple(_rounded(median(values)) for values in rounds),
            )

    def _rate_cells(self) -> Iterator[Rate]:
        for (family, placement, size, transport), rounds in self._rates.items():
            has_cpu = family == "throughput"
            has_doorbells = transport.startswith("ring") and family != "uvloop"
            yield Rate(
                family=family,
                placement=placement,
                size=size,
                transport=transport,
                per_s=round(median([found.messages_per_s for found in rounds]), 1),
                cpu_us=_rounded(median([found.cpu_us for found in rounds])) if has_cpu else None,
                doorbells=round(median([found.doorbells for found in rounds]), 5) if has_doorbells else None,
                rounds_per_s=tuple(round(found.messages_per_s, 1) for found in rounds),
                rounds_cpu_us=tuple(_rounded(found.cpu_us) for found in rounds) if has_cpu else (),
            )

    def _bounds(self) -> Iterator[Bound]:
        at_once = min(len(self._cpus), len(NAMES))
        for family, rounds in self._codec_us.items():
            cpu_us = median(rounds)
            yield Bound(
                family=family,
                cpu_us=_rounded(cpu_us),
                per_s=round(at_once * 1e6 / cpu_us, 1),
                rounds_cpu_us=tuple(_rounded(value) for value in rounds),
            )


def _rounded(value: float) -> float:
    return round(value, 3)
