"""Where the executor computes: a CUDA device, or the CPU with Triton's interpreter in its place.

Whatever else runs on a GPU runs unchanged on the CPU. Only what lies behind ``Device`` differs: streams and events,
graphs, pinned memory, the memory that KV pages come from, and what the device says of itself.

The compute stream takes work in the order in which it was submitted. The host goes on at once; it learns from an event
that all work submitted before the event was recorded has been done.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakSet

import torch

from ringserve.engine.array_namespace import ArrayNamespace, CupyNamespace, NumpyNamespace
from ringserve.engine.transfer_lane import CudaLane, ImmediateLane, TransferLane
from ringserve.kernels.gpu.architecture import Architecture, architecture_of


class Event(Protocol):
    """A point in the compute stream."""

    def record(self) -> None:
        """From now on the event stands for the end of everything submitted so far."""

    def synchronize(self) -> None:
        """Wait for it on the host. Raises what the device reports (RuntimeError) where work has failed."""

    def is_done(self) -> bool:
        """Whether ``synchronize`` would return at once."""


class Device(Protocol):
    """One device, its compute stream and its memory."""

    @property
    def torch_device(self) -> torch.device:
        """Where tensors go."""

    @property
    def name(self) -> str:
        """The model of the device, for people."""

    @property
    def architecture(self) -> Architecture:
        """Whose configurations the kernels get."""

    @property
    def num_multiprocessors(self) -> int:
        """For the number of splits of decode attention."""

    @property
    def namespace(self) -> ArrayNamespace:
        """Memory for KV pages, and for swapped ones on the host."""

    def free_bytes(self) -> int:
        """Of the device's memory, now."""

    def total_bytes(self) -> int:
        """Of the device's memory."""

    def pinned(self, num_words: int) -> torch.Tensor:
        """Uninitialised int32 memory of the host that the device copies from and to on its own."""

    def submit(self, work: Callable[[], None]) -> None:
        """Run ``work``, which launches and copies but waits for nothing, in the compute stream."""

    def event(self) -> Event:
        """A new event; it is done as long as it was not recorded."""

    def synchronize(self) -> None:
        """Wait for all work."""

    def transfer_lane(self) -> TransferLane:
        """A new lane beside the compute stream."""

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        """``work`` as one launch. It is run once before, so that everything is compiled and set up.

        All graphs share the memory of what they allocate: what one leaves there is gone once another runs. Capture the
        largest first, from which the others then take theirs.
        """


class CudaDevice:
    """A GPU; its compute stream is torch's current stream."""

    def __init__(self, index: int = 0) -> None:
        self._device = torch.device("cuda", index)
        self._namespace: CupyNamespace | None = None
        self._capture_stream: Any = None
        self._graph_pool: Any = None
        self._graphs: WeakSet[Any] = WeakSet()
        """Those that somebody still has."""

    @property
    def torch_device(self) -> torch.device:
        return self._device

    @property
    def name(self) -> str:
        return str(torch.cuda.get_device_name(self._device))

    @property
    def architecture(self) -> Architecture:
        return architecture_of(torch.cuda.get_device_capability(self._device)[0], hip=torch.version.hip is not None)

    @property
    def num_multiprocessors(self) -> int:
        return int(torch.cuda.get_device_properties(self._device).multi_processor_count)

    @property
    def namespace(self) -> ArrayNamespace:
        if self._namespace is None:  # CuPy is imported for the pool and not before
            self._namespace = CupyNamespace(self._device.index)
        return self._namespace

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def total_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    def pinned(self, num_words: int) -> torch.Tensor:
        return torch.empty(num_words, dtype=torch.int32, pin_memory=True)

    def submit(self, work: Callable[[], None]) -> None:
        work()

    def event(self) -> Event:
        return _CudaEvent(self._device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def transfer_lane(self) -> TransferLane:
        return CudaLane(self._device)

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        if self._capture_stream is None:
            self._capture_stream = torch.cuda.Stream(self._device)
        # The same stream for both, always: cuBLAS allocates a workspace for each stream, which belongs in no graph.
        stream: Any = self._capture_stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        if not self._graphs:  # a pool whose graphs are all gone must not be used again
            self._graph_pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._graph_pool, stream=stream):
                work()
        except RuntimeError as error:
            # Ending a capture that has failed may fail in its turn: what failed first is told.
            if isinstance(error.__context__, torch.OutOfMemoryError):
                raise error.__context__ from None
            raise
        self._graphs.add(graph)
        replay: Callable[[], None] = graph.replay
        return replay


class _CudaEvent:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: Any = torch.cuda.Event()

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def synchronize(self) -> None:
        self._event.synchronize()

    def is_done(self) -> bool:
        return bool(self._event.query())


class HostDevice:
    """The CPU in a GPU's place, for tests and dry runs: kernels run in Triton's interpreter, everything at once."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def name(self) -> str:
        return "Triton's interpreter"

    @property
    def architecture(self) -> Architecture:
        return Architecture.LARGE

    @property
    def num_multiprocessors(self) -> int:
        return 2  # one program runs after the other: each more costs time

    @property
    def namespace(self) -> ArrayNamespace:
        return NumpyNamespace()

    def free_bytes(self) -> int:
        return 1 << 30

    def total_bytes(self) -> int:
        return 1 << 30

    def pinned(self, num_words: int) -> torch.Tensor:
        return torch.empty(num_words, dtype=torch.int32)

    def submit(self, work: Callable[[], None]) -> None:
        work()

    def event(self) -> Event:
        return _PastEvent()

    def synchronize(self) -> None:
        pass

    def transfer_lane(self) -> TransferLane:
        return ImmediateLane()

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        work()
        return lambda: _drop(work())


class _PastEvent:
    """On the host everything submitted is over."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def is_done(self) -> bool:
        return True


def _drop(_: object) -> None:
    pass
