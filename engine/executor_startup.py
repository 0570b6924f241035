"""Everything that happens between an executor's settings and a model that is ready to run: the device is chosen here,
and its own module does the rest. Nothing that one device needs is imported for another."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ringserve.config import ExecutorSettings
from ringserve.engine.devices import CPU, GPU, choose_device
from ringserve.engine.gpu.fit import collect_facts, misfit
from ringserve.engine.model_error import UnsupportedDeviceError
from ringserve.engine.ready_engine import Engine

Progress = Callable[[str, float], None]

logger = logging.getLogger("ringserve.executor")


def build_engine(settings: ExecutorSettings, threads: int, fast_threads: int, progress: Progress) -> Engine:
    """``threads``: of torch; ``fast_threads``: of the fast path, where it applies. Raises ModelError with one line
    where the model cannot be served as asked."""
    device = choose_device(settings.config.device, lambda: misfit(collect_facts()))
    if device == GPU:
        from ringserve.engine.gpu.device import CudaDevice
        from ringserve.engine.gpu.startup import build_gpu_engine  # Triton and the GPU's kernels
        from ringserve.engine.torch_setup import set_threads

        set_threads(threads)
        try:
            return build_gpu_engine(settings, device, CudaDevice(), threads, progress)
        except UnsupportedDeviceError as error:
            if settings.config.device == "cuda":
                raise
            logger.warning("computing on the CPU: %s", error)
    from ringserve.engine.cpu_startup import build_cpu_engine  # numba and the CPU's kernels

    return build_cpu_engine(settings, CPU, threads, fast_threads, progress)
