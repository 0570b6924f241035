"""Where a phase runs, and its clock: ``engine.gpu.device``'s, of a GPU or in a dry run the CPU's."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from ringserve.engine.array_namespace import ArrayNamespace
from ringserve.engine.gpu import device as engine_device
from ringserve.engine.transfer_lane import TransferLane
from ringserve.kernels.gpu.architecture import Architecture


class Device:
    """The device of a phase."""

    def __init__(self, dry: bool) -> None:
        self.dry = dry
        self.engine: engine_device.Device = engine_device.HostDevice() if dry else engine_device.CudaDevice()
        """As the executor sees it."""
        self.torch = self.engine.torch_device

    @property
    def architecture(self) -> Architecture:
        """Whose configurations the kernels get."""
        return self.engine.architecture

    @property
    def num_multiprocessors(self) -> int:
        """For the number of splits."""
        return self.engine.num_multiprocessors

    @property
    def namespace(self) -> ArrayNamespace:
        """Memory for KV pages."""
        return self.engine.namespace

    @property
    def dtype(self) -> torch.dtype:
        """Of models and pages. The stock interpreter is wrong on bfloat16."""
        return torch.float32 if self.dry else torch.bfloat16

    def synchronize(self) -> None:
        """Wait for the device."""
        self.engine.synchronize()

    def free_bytes(self) -> int:
        """Of the device's memory."""
        return self.engine.free_bytes()

    def transfer_lane(self) -> TransferLane:
        """A new one."""
        return self.engine.transfer_lane()

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        """``work`` as a graph; see ``engine.gpu.device.Device``."""
        return self.engine.capture(work)

    def seconds(self, work: Callable[[], object], repeats: int = 10, warm_up: int = 2) -> float:
        """The median time of one run of ``work``, by the device's clock."""
        if self.dry:
            repeats, warm_up = 1, 0
        for _ in range(warm_up):
            work()
        times = []
        for _ in range(repeats):
            if self.dry:
                start = time.perf_counter()
                work()
                times.append(time.perf_counter() - start)
            else:
                before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                before.record()
                work()
                after.record()
                after.synchronize()
                times.append(before.elapsed_time(after) / 1000)
        return median(times)
