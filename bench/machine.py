"""What a result needs to be read later: the machine, the versions, and whether anybody else was computing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from pathlib import Path


def describe() -> dict[str, object]:
    """Processor, cores, versions."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy", "ringserve")},
    }


class OtherLoad:
    """Cores used by processes that are not part of a measurement."""

    def __init__(self) -> None:
        self._wall = time.monotonic()
        self._machine = _machine_seconds()

    def cores(self, own_seconds: float) -> float:
        """Cores used since construction by everybody else; ``own_seconds``: CPU seconds of what is measured."""
        wall = time.monotonic() - self._wall
        return max(0.0, (_machine_seconds() - self._machine - own_seconds) / wall)


def tree_seconds(pids: list[int]) -> float:
    """CPU seconds of living processes so far."""
    total = 0.0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def _machine_seconds() -> float:
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    idle = fields[3] + fields[4]
    return (sum(fields[:8]) - idle) / os.sysconf("SC_CLK_TCK")
