"""One duplex link for each transport: two ends, each made in its own process, each blocking.

Every transport is used the way its documentation says a program should; what can send several messages in one go does.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import socket
import struct
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

from ringserve.bench import ipc_iceoryx
from ringserve.shm import (
    MAX_SPIN_US,
    Consumer,
    ConsumerEnd,
    Doorbell,
    DoorbellHandle,
    Producer,
    ProducerEnd,
    Transport,
    create_channel,
    create_doorbell,
)
from ringserve.shm.descriptors import Descriptor


class End(Protocol):
    """One end of a link."""

    def send(self, messages: Sequence[bytes]) -> None:
        """Send, waiting where the other end is slow."""

    def receive(self) -> list[bytes]:
        """Block; at least one message."""

    def doorbells(self) -> int:
        """System calls that woke the other end, where that is known."""

    def close(self) -> None: ...


class EndSpec(Protocol):
    """What an end is made from, in the process that uses it."""

    def open(self) -> End: ...


@dataclass
class Link:
    """Both ends, and what the creator must close when the processes are done."""

    near: EndSpec
    far: EndSpec
    close: Callable[[], None]


# ------------------------------------------------------------------------------------------------------- ours


@dataclass(frozen=True)
class ChannelSpec:
    """A ring, or its fallback, in both directions."""

    bell: DoorbellHandle
    incoming: ConsumerEnd
    outgoing: ProducerEnd
    spin_us: int

    def open(self) -> ChannelEnd:
        return ChannelEnd(self)


class ChannelEnd:
    """As an actor uses its channels: drain, put, flush once, arm, wait."""

    def __init__(self, spec: ChannelSpec) -> None:
        self._bell = Doorbell.attach(spec.bell)
        if spec.spin_us:
            self._bell.allow_spin(spec.spin_us)
        self._consumer = Consumer.attach(spec.incoming)
        self._producer = Producer.attach(spec.outgoing)
        self._consumers, self._producers = [self._consumer], [self._producer]
        self._try_put, self._flush = self._producer.try_put, self._producer.flush
        self._drain, self._arm, self._wait = self._consumer.drain, self._bell.arm, self._bell.wait
        self._max_payload = self._producer.max_payload

    def send(self, messages: Sequence[bytes]) -> None:
        for data in messages:
            if len(data) > self._max_payload:
                self._send_parts(data)
                continue
            while not self._try_put(data):
                self._wait_for_space()
        self._flush()

    def _send_parts(self, data: bytes) -> None:
        offset = 0
        while (offset := self._producer.put_part(data, offset)) < len(data):
            self._wait_for_space()

    def _wait_for_space(self) -> None:
        if self._arm((), self._producers):
            self._wait()

    def receive(self) -> list[bytes]:
        while True:
            if self._arm(self._consumers, ()):
                self._wait()
            if messages := self._drain():
                return messages

    def doorbells(self) -> int:
        return self._producer.statistics().doorbell_writes

    def close(self) -> None:
        for thing in (self._producer, self._consumer, self._bell):
            thing.close()


def _channel_link(transport: Transport, spin_us: int = 0) -> Link:
    near, far = (create_doorbell(name, transport=transport) for name in ("near", "far"))
    forth = create_channel("forth", producer=near, consumer=far, transport=transport)
    back = create_channel("back", producer=far, consumer=near, transport=transport)

    def close_channels() -> None:
        forth.close()
        back.close()

    def close() -> None:
        close_channels()
        near.close()
        far.close()

    return Link(
        ChannelSpec(near, back.consumer_end, forth.producer_end, spin_us),
        ChannelSpec(far, forth.consumer_end, back.producer_end, spin_us),
        close,
    )


# ----------------------------------------------------------------------------------------------------- pyzmq


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


def _zmq_link() -> Link:
    directory = tempfile.TemporaryDirectory(prefix="bench-ipc-")
    address = f"ipc://{directory.name}/pair"
    return Link(ZmqSpec(address, True), ZmqSpec(address, False), directory.cleanup)


# ------------------------------------------------------------------------------------------- standard library


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


def _queue_link() -> Link:
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


def _pipe_link() -> Link:
    near, far = multiprocessing.Pipe()

    def close() -> None:
        near.close()
        far.close()

    return Link(PipeSpec(near), PipeSpec(far), close)


_LENGTH = struct.Struct("=I")


class Unframer:
    """Messages with a length before each, out of a stream of bytes."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """The messages that are complete now."""
        buffer = self._buffer
        buffer += data
        messages, position = [], 0
        while len(buffer) - position >= 4:
            end = position + 4 + _LENGTH.unpack_from(buffer, position)[0]
            if end > len(buffer):
                break
            messages.append(bytes(memoryview(buffer)[position + 4 : end]))
            position = end
        if position:
            del buffer[:position]
        return messages


def framed(messages: Sequence[bytes]) -> bytes:
    """A length before each."""
    return b"".join(piece for data in messages for piece in (_LENGTH.pack(len(data)), data))


@dataclass(frozen=True)
class UnixSpec:
    """One end of a stream socket pair."""

    descriptor: Descriptor

    def open(self) -> UnixEnd:
        return UnixEnd(self.socket())

    def socket(self) -> socket.socket:
        return socket.socket(fileno=os.dup(self.descriptor.fileno()))


class UnixEnd:
    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._unframer = Unframer()
        self._chunk = bytearray(1 << 18)

    def send(self, messages: Sequence[bytes]) -> None:
        self._socket.sendall(framed(messages))

    def receive(self) -> list[bytes]:
        while True:
            got = self._socket.recv_into(self._chunk)
            if not got:
                raise EOFError("the other end is gone")
            if messages := self._unframer.feed(memoryview(self._chunk)[:got]):
                return messages

    def doorbells(self) -> int:
        return 0

    def close(self) -> None:
        self._socket.close()


def unix_link() -> Link:
    """A stream socket pair; also for event loops."""
    near, far = (Descriptor(end.detach()) for end in socket.socketpair())

    def close() -> None:
        near.close()
        far.close()

    return Link(UnixSpec(near), UnixSpec(far), close)


# ------------------------------------------------------------------------------------------------- others


FIFO_SIZE = 8 << 20
FIFO_BURST = FIFO_SIZE // 4


def _faster_fifo_link() -> Link:
    faster_fifo = importlib.import_module("faster_fifo")
    importlib.import_module("faster_fifo_reduction")  # makes its queues picklable
    forth, back = (faster_fifo.Queue(max_size_bytes=FIFO_SIZE) for _ in range(2))
    return Link(FasterFifoSpec(back, forth), FasterFifoSpec(forth, back), lambda: None)


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


def _iceoryx_link() -> Link:
    near, far = ipc_iceoryx.specs()
    return Link(near, far, lambda: None)


BASELINE = "pyzmq"

LINKS: dict[str, tuple[str | None, Callable[[], Link]]] = {
    "ring": (None, lambda: _channel_link("ring")),
    "ring-spin": (None, lambda: _channel_link("ring", MAX_SPIN_US)),
    "socket": (None, lambda: _channel_link("socket")),
    BASELINE: ("zmq", _zmq_link),
    "mp.Queue": (None, _queue_link),
    "mp.Pipe": (None, _pipe_link),
    "unix": (None, unix_link),
    "iceoryx2": ("iceoryx2", _iceoryx_link),
    "faster-fifo": ("faster_fifo", _faster_fifo_link),
}
"""(module that must be importable, constructor); "ring-spin" may spin 20 us before it sleeps, "socket" is our
fallback, "unix" a raw stream socket pair."""


def available() -> list[str]:
    """Transports that can be measured here."""
    return [name for name, (module, _) in LINKS.items() if module is None or importlib.util.find_spec(module)]
