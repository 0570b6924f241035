"""What a run of ``ringserve bench ipc`` found, and how it compares with the targets of the design."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from ringserve.bench.ipc_links import BASELINE, LINKS

Placement = Literal["unpinned", "shared", "separate"]


class Latency(msgspec.Struct, kw_only=True, frozen=True):
    """Distribution of one cell, in microseconds."""

    family: str
    """"busy" and "idle" (one way between two blocking processes; idle: a millisecond between messages), "uvloop" (one
    way between two event loops), "engine" and "small" (round trip over six hops, one in flight)."""
    placement: Placement
    size: int
    """Bytes; 0: the engine's messages."""
    transport: str
    samples: int
    p50_us: float
    p99_us: float
    p999_us: float
    rounds_p50_us: tuple[float, ...]
    ratio: float | None = None
    """Of p50 to pyzmq's: median over the rounds."""


class Rate(msgspec.Struct, kw_only=True, frozen=True):
    """Saturation of one cell; medians over the rounds."""

    family: str
    """"throughput" (bursts of 32), "uvloop", "engine" and "small" (round trips with 32 in flight)."""
    placement: Placement
    size: int
    transport: str
    per_s: float
    cpu_us: float | None
    """Of both processes per message."""
    doorbells: float | None
    """System calls that woke the other side, per message."""
    rounds_per_s: tuple[float, ...]
    rounds_cpu_us: tuple[float, ...] = ()
    ratio: float | None = None
    """Of the rate to pyzmq's."""
    cpu_ratio: float | None = None


class Idle(msgspec.Struct, frozen=True):
    """A process that waits for a message that does not come."""

    transport: str
    seconds: float
    cpu_ms: float
    context_switches: int


class Bound(msgspec.Struct, frozen=True):
    """What the six hops' encoding, decoding and building leave to any transport, however fast."""

    family: str
    cpu_us: float
    """Of a round trip, all processes together, without transport."""
    per_s: float
    """Round trips that the processors could do, if they did nothing else."""
    ratio: float | None = None
    """Of that rate to pyzmq's."""
    rounds_cpu_us: tuple[float, ...] = ()


class Target(msgspec.Struct, frozen=True):
    """A goal of the design against what was measured."""

    what: str
    measured: float
    goal: float
    met: bool


class Results(msgspec.Struct, kw_only=True):
    """Everything."""

    latencies: list[Latency] = []
    rates: list[Rate] = []
    idle: list[Idle] = []
    bounds: list[Bound] = []
    targets: list[Target] = []
    notes: list[str] = []


def with_ratios(results: Results) -> Results:
    """Fill in the ratios to pyzmq within each round, and the targets."""
    latency_base = {
        (c.family, c.placement, c.size): c.rounds_p50_us for c in results.latencies if c.transport == BASELINE
    }
    rate_base = {(c.family, c.placement, c.size): c for c in results.rates if c.transport == BASELINE}
    latencies = [
        msgspec.structs.replace(c, ratio=_ratio(c.rounds_p50_us, latency_base.get((c.family, c.placement, c.size), ())))
        for c in results.latencies
    ]
    rates = []
    for cell in results.rates:
        base = rate_base.get((cell.family, cell.placement, cell.size))
        ratio = _ratio(cell.rounds_per_s, base.rounds_per_s) if base else None
        cpu_ratio = _ratio(cell.rounds_cpu_us, base.rounds_cpu_us) if base else None
        rates.append(msgspec.structs.replace(cell, ratio=ratio, cpu_ratio=cpu_ratio))
    bounds = [
        msgspec.structs.replace(bound, ratio=bound.per_s / base.per_s if base else None)
        for bound in results.bounds
        for base in [rate_base.get((bound.family, "unpinned", 0))]
    ]
    filled = Results(latencies=latencies, rates=rates, idle=results.idle, bounds=bounds, notes=results.notes)
    order = list(LINKS)
    latencies.sort(key=lambda cell: order.index(cell.transport))
    rates.sort(key=lambda cell: order.index(cell.transport))
    filled.targets = list(_targets(filled))
    return filled


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    if not ours or len(ours) != len(theirs):
        return None
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def _targets(results: Results) -> Iterable[Target]:
    """Those that this tool can show; the fences, the kills and what is left behind have runs of their own."""
    latency = {(c.family, c.placement, c.size, c.transport): c for c in results.latencies}
    rate = {(c.family, c.placement, c.size, c.transport): c for c in results.rates}

    def at_most(what: str, measured: float | None, goal: float) -> Iterable[Target]:
        if measured is not None:
            yield Target(what, measured, goal, measured <= goal)

    def p50_ratio(family: str, placement: Placement, size: int, transport: str = "ring") -> float | None:
        cell = latency.get((family, placement, size, transport))
        return cell.ratio if cell else None

    yield from at_most("64 B one way, unpinned, to pyzmq", p50_ratio("busy", "unpinned", 64), 0.20)
    yield from at_most("64 B one way, two cores, to pyzmq", p50_ratio("busy", "separate", 64), 0.55)
    yield from at_most("64 B one way, 1 ms gaps, to pyzmq", p50_ratio("idle", "unpinned", 64), 0.30)
    yield from at_most("64 B one way, uvloop, to zmq.asyncio", p50_ratio("uvloop", "unpinned", 64), 0.12)
    yield from at_most("512 KiB one way, to pyzmq", p50_ratio("busy", "unpinned", 512 * 1024), 0.60)
    yield from at_most("64 B one way, fallback, to pyzmq", p50_ratio("busy", "unpinned", 64, "socket"), 0.30)
    spin = latency.get(("busy", "separate", 64, "ring-spin"))
    yield from at_most("64 B one way, spin, two cores, us", spin.p50_us if spin else None, 1.0)
    shared = [latency.get(("busy", "shared", 64, name)) for name in ("ring-spin", "ring")]
    if shared[0] and shared[1]:
        slower = _ratio(shared[0].rounds_p50_us, shared[1].rounds_p50_us)
        yield from at_most("64 B one way, spin, one core, to blocking", slower, 1.15)
    for size, name, goal in ((64, "64 B", 0.35), (1024, "1 KiB", 0.30), (16384, "16 KiB", 0.15)):
        cell = rate.get(("throughput", "unpinned", size, "ring"))
        yield from at_most(f"CPU per message, {name}, to pyzmq", cell.cpu_ratio if cell else None, goal)
    for family in ("small", "engine"):
        yield from at_most(f"six hops, {family} messages, to pyzmq", p50_ratio(family, "unpinned", 0), 0.25)
        cell = rate.get((family, "unpinned", 0, "ring"))
        if cell and cell.ratio is not None:
            name = f"six hops, {family} messages, round trips/s at 32, to pyzmq (at least)"
            yield Target(name, cell.ratio, 8.0, cell.ratio >= 8.0)
    cell = rate.get(("throughput", "unpinned", 64, "ring"))
    yield from at_most("doorbells per message, 64 B, saturated", cell.doorbells if cell else None, 0.02)
    for idle in results.idle:
        if idle.transport == "ring":
            yield from at_most(f"CPU when idle for {idle.seconds:g} s, ms", idle.cpu_ms, 0.0)
            yield from at_most("context switches when idle", float(idle.context_switches), 0.0)
