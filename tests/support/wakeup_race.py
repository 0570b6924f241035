"""Races around falling asleep, two threads on two processors, in C: see wakeup_race.c.

As a command it is the kept benchmark run: ``python -P tests/support/wakeup_race.py --arms 10000000 --json FILE``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Literal

from ring_builds import WAKEUP_RACE, build, load

from ringserve.shm.bell_page import PAGE_SIZE, format_bell
from ringserve.shm.descriptors import create_sealed_memfd

CAPACITY = 1 << 16
MAX_FRAME = CAPACITY // 8
Handshake = Literal["sleep", "space"]


def build_race(directory: Path, *, fences: bool) -> ModuleType:
    """Compile the race with or without the product's fences, and load it."""
    flags = () if fences else ("-DRINGSERVE_WITHOUT_FENCES",)
    path = build(directory / f"_wakeup_race_{'with' if fences else 'without'}_fences.so", WAKEUP_RACE, *flags)
    return load("_wakeup_race", path)


def two_processors() -> tuple[int, int] | None:
    """Two that this process may use; None if it has but one."""
    allowed = sorted(os.sched_getaffinity(0))
    return (allowed[0], allowed[-1]) if len(allowed) > 1 else None


def run_race(module: ModuleType, handshake: Handshake, rounds: int, seed: int, cpus: tuple[int, int]) -> dict[str, int]:
    """``rounds`` arms; counts: slept, refused (saw it coming), lost, rung_awake."""
    with _ends(module, handshake) as (bell, producer, consumer):
        race = module.race_sleep if handshake == "sleep" else module.race_space
        counts: dict[str, int] = race(bell, producer, consumer, rounds, seed, *cpus)
    return counts


@contextmanager
def _ends(module: ModuleType, handshake: Handshake) -> Iterator[tuple[object, object, object]]:
    """One ring, both ends, and the doorbell of the side that sleeps."""
    segment = create_sealed_memfd("race", PAGE_SIZE + CAPACITY)
    agreed = (CAPACITY, MAX_FRAME, 1, 2)
    module.format_ring(segment, *agreed)
    opened = [segment]
    bells = []
    for name in ("producer", "consumer"):
        page, event = create_sealed_memfd(name, PAGE_SIZE), os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        opened += [page, event]
        format_bell(page)
        # Of each bell the owner's object, and the neighbour's.
        bells.append((module.Bell(page, event), module.Bell(page, event)))
    (producers, producers_peer), (consumers, consumers_peer) = bells
    producer = module.RingProducer("race", segment, consumers_peer, *agreed)
    consumer = module.RingConsumer("race", segment, producers_peer, *agreed)
    try:
        yield (consumers if handshake == "sleep" else producers), producer, consumer
    finally:
        for thing in (producer, consumer, *bells[0], *bells[1]):
            thing.close()
        for fd in opened:
            os.close(fd)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--arms", type=int, default=10_000_000, help="rounds of each handshake with fences")
    parser.add_argument("--arms-without", type=int, default=1_000_000, help="rounds of each without fences")
    parser.add_argument("--json", type=Path, help="keep the result here")
    options = parser.parse_args()
    cpus = two_processors()
    if cpus is None:
        sys.exit("needs two processors")
    runs = []
    with tempfile.TemporaryDirectory() as directory:
        for fences, rounds in ((True, options.arms), (False, options.arms_without)):
            module = build_race(Path(directory), fences=fences)
            for handshake in ("sleep", "space"):
                start = time.perf_counter()
                counts = run_race(module, handshake, rounds, 1, cpus)
                seconds = round(time.perf_counter() - start, 2)
                runs.append({"handshake": handshake, "fences": fences, "arms": rounds, **counts, "seconds": seconds})
                print(json.dumps(runs[-1]), flush=True)
    result = {"machine": platform.machine(), "kernel": platform.release(), "cpus": cpus, "runs": runs}
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    with_fences = [run for run in runs if run["fences"]]
    without = [run for run in runs if not run["fences"]]
    return 0 if not any(run["lost"] for run in with_fences) and all(run["lost"] for run in without) else 1


if __name__ == "__main__":
    sys.exit(main())
