"""CPU time of an engine's processes, by their names, for differences over a fraction of a second. Linux only."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path

from ringserve.bench.machine import tree_seconds


def cpu_by_process(pids: Mapping[str, int]) -> dict[str, float]:
    """Seconds so far of this process (``client``) and of those."""
    return {"client": time.process_time(), **{name: cpu_seconds(pid) for name, pid in pids.items()}}


def cpu_seconds(pid: int) -> float:
    """User and system time; nanoseconds where the kernel counts them (a tick is coarse here). 0 if it has ended."""
    try:
        return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")) * 1e-9
    except OSError:  # a thread ended just now, or there is no such file
        with contextlib.suppress(OSError):
            return tree_seconds([pid])
        return 0.0


def process_name(pid: int) -> str:
    """As the engine calls it; ``supervisor`` for a process without such a name, ``ended`` for one that is gone."""
    try:
        comm = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "ended"
    return comm.removeprefix("rs-") if comm.startswith("rs-") else "supervisor"


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Of two readings; who was not there before began with nothing."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}
