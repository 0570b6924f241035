"""How many processors this process may compute on: what its affinity leaves, and its control group's share of time."""

from __future__ import annotations

import os
from math import ceil
from pathlib import Path


def usable_processors(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """At least one. A quota (containers' ``--cpus``) is rounded up: threads beyond it would use it up while they wait
    for one another, and then all of them would stand still until the next period."""
    allowed = len(os.sched_getaffinity(0))
    quota = _quota(cgroup)
    return allowed if quota is None else max(1, min(allowed, ceil(quota)))


def _quota(cgroup: Path) -> float | None:
    """Processors' worth of time in each period, of control groups version 2 or 1; None without a limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        directory = cgroup / "cpu"
        try:
            quota, period = ((directory / name).read_text() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
        except OSError:
            return None
    try:
        return int(quota) / int(period) if int(quota) > 0 else None
    except (ValueError, ZeroDivisionError):  # "max"
        return None
