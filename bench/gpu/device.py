"""Where a phase runs: a CUDA device, or the CPU with Triton's interpreter in a dry run.

Only clocks and graphs differ.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from ringserve.kernels.gpu.architecture import Architecture, architecture_of


class Device:
    """The device of a phase."""

    def __init__(self, dry: bool) -> None:
        self.dry = dry
        self.torch = torch.device("cpu" if dry else "cuda")
        self._graph_pool: Any = None

    @property
    def architecture(self) -> Architecture:
        """Whose configurations the kernels get."""
        if self.dry:
            return Architecture.LARGE
        return architecture_of(torch.cuda.get_device_capability()[0], hip=torch.version.hip is not None)

    @property
    def num_multiprocessors(self) -> int:
        """For the number of splits."""
        return 8 if self.dry else int(torch.cuda.get_device_properties(self.torch).multi_processor_count)

    @property
    def dtype(self) -> torch.dtype:
        """Of models and pages. The stock interpreter is wrong on bfloat16."""
        return torch.float32 if self.dry else torch.bfloat16

    def synchronize(self) -> None:
        """Wait for the device."""
        if not self.dry:
            torch.cuda.synchronize()

    def free_bytes(self) -> int:
        """Of the device's memory."""
        return 1 << 30 if self.dry else int(torch.cuda.mem_get_info()[0])

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        """``work`` as a CUDA graph: run once before, on a stream of its own, then captured. All graphs share a pool, so
        none may rely on memory of another; capture the largest first. On a CPU, work itself."""
        if self.dry:
            return lambda: void(work())
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        if self._graph_pool is None:
            self._graph_pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_pool):
            work()
        return graph.replay

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


def void(_: object) -> None:
    """Drop a result."""
