"""faster-fifo's queues as a link; only where they are installed."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ringserve.bench.ipc_ends import Link

FIFO_SIZE = 8 << 20
FIFO_BURST = FIFO_SIZE // 4


@dataclass(frozen=True)
class FasterFifoSpec:
    incoming: Any
    outgoing: Any

    def open(self) -> FasterFifoEnd:
        return FasterFifoEnd(self)


class FasterFifoEnd:
    def __init__(self, spec: FasterFifoSpec) -> None:
        self._spec = spec

    def send(self, messages: Sequence[bytes]) -> None:
        if sum(map(len, messages)) <= FIFO_BURST:
            self._spec.outgoing.put_many(messages, timeout=60.0)
            return
        for data in messages:  # a burst must fit as a whole
            self._spec.outgoing.put(data, timeout=60.0)

    def receive(self) -> list[bytes]:
        return list(self._spec.incoming.get_many(block=True, timeout=600.0, max_messages_to_get=64))

    def doorbells(self) -> int:
        return 0

    def close(self) -> None:
        self._spec.outgoing.close()


def faster_fifo_link() -> Link:
    """Two queues."""
    faster_fifo = importlib.import_module("faster_fifo")
    importlib.import_module("faster_fifo_reduction")  # makes its queues picklable
    forth, back = (faster_fifo.Queue(max_size_bytes=FIFO_SIZE) for _ in range(2))
    return Link(FasterFifoSpec(back, forth), FasterFifoSpec(forth, back), lambda: None)
