"""The standard library's Queue and Pipe of multiprocessing as links."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from ringserve.bench.ipc_ends import Link


@dataclass(frozen=True)
class QueueSpec:
    """Two queues; multiprocessing.Queue, or anything with put and get."""

    incoming: Any
    outgoing: Any

    def open(self) -> QueueEnd:
        return QueueEnd(self)


class QueueEnd:
    def __init__(self, spec: QueueSpec) -> None:
        self._spec = spec
        self._get, self._put = spec.incoming.get, spec.outgoing.put

    def send(self, messages: Sequence[bytes]) -> None:
        for data in messages:
            self._put(data)

    def receive(self) -> list[bytes]:
        return [self._get()]

    def doorbells(self) -> int:
        return 0

    def close(self) -> None:
        self._spec.outgoing.close()


def queue_link() -> Link:
    """Two queues of the spawn context."""
    context = multiprocessing.get_context("spawn")
    forth, back = context.Queue(), context.Queue()

    def close() -> None:
        for queue in (forth, back):
            queue.close()
            queue.join_thread()

    return Link(QueueSpec(back, forth), QueueSpec(forth, back), close)


@dataclass(frozen=True)
class PipeSpec:
    connection: Connection

    def open(self) -> PipeEnd:
        return PipeEnd(self.connection)


class PipeEnd:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, messages: Sequence[bytes]) -> None:
        for data in messages:
            self._connection.send_bytes(data)

    def receive(self) -> list[bytes]:
        return [self._connection.recv_bytes()]

    def doorbells(self) -> int:
        return 0

    def close(self) -> None:
        self._connection.close()


def pipe_link() -> Link:
    """One pipe; it is duplex."""
    near, far = multiprocessing.Pipe()

    def close() -> None:
        near.close()
        far.close()

    return Link(PipeSpec(near), PipeSpec(far), close)
