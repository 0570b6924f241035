"""pyzmq as a link; an extra."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from ringserve.bench.ipc_ends import Link


@dataclass(frozen=True)
class ZmqSpec:
    """A PAIR socket over ipc, high-water mark 1000 (the default)."""

    address: str
    binds: bool

    def open(self) -> ZmqEnd:
        return ZmqEnd(self)


class ZmqEnd:
    def __init__(self, spec: ZmqSpec) -> None:
        import zmq  # an extra

        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        if spec.binds:
            self._socket.bind(spec.address)
        else:
            self._socket.connect(spec.address)

    def send(self, messages: Sequence[bytes]) -> None:
        for data in messages:
            self._socket.send(data)

    def receive(self) -> list[bytes]:
        return [self._socket.recv()]

    def doorbells(self) -> int:
        return 0

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


def zmq_link() -> Link:
    """A pair over a socket file in a directory of its own."""
    directory = tempfile.TemporaryDirectory(prefix="bench-ipc-")
    address = f"ipc://{directory.name}/pair"
    return Link(ZmqSpec(address, True), ZmqSpec(address, False), directory.cleanup)
