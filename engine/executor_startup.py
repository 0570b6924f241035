"""Everything that happens between an executor's settings and a model that is ready to run: the device is chosen here,
and its own module does the rest. Nothing that one device needs is imported for another."""

from __future__ import annotations

from collections.abc import Callable

from ringserve.config import ExecutorSettings
from ringserve.engine.devices import choose_device
from ringserve.engine.ready_engine import Engine

Progress = Callable[[str, float], None]


def build_engine(settings: ExecutorSettings, threads: int, fast_threads: int, progress: Progress) -> Engine:
    """``threads``: of torch; ``fast_threads``: of the fast path, where it applies. Raises ModelError with one line
    where the model cannot be served as asked."""
    device = choose_device(settings.config.device)
    from ringserve.engine.cpu_startup import build_cpu_engine  # numba and the CPU's kernels

    return build_cpu_engine(settings, device, threads, fast_threads, progress)
