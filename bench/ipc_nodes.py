"""A process's ends towards its neighbours on the six hops: our channels, or pyzmq's sockets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ringserve.shm import Consumer, ConsumerEnd, Doorbell, DoorbellHandle, Producer, ProducerEnd, WouldBlock
from ringserve.shm.typed import MESSAGES_PER_FLUSH


class Node(Protocol):
    """A process's ends towards its neighbours."""

    def send(self, target: str, data: bytes) -> None: ...

    def receive(self) -> list[bytes]:
        """Flush, then block; what is there, at most a bounded batch."""


@dataclass(frozen=True)
class ChannelNodeSpec:
    bell: DoorbellHandle
    inbox: tuple[ConsumerEnd, ...]
    outbox: tuple[tuple[str, ProducerEnd], ...]

    def open(self) -> ChannelNode:
        return ChannelNode(self)


class ChannelNode:
    def __init__(self, spec: ChannelNodeSpec) -> None:
        self._bell = Doorbell.attach(spec.bell)
        self._consumers = tuple(Consumer.attach(end) for end in spec.inbox)
        self._producers = {name: Producer.attach(end) for name, end in spec.outbox}
        self._unpublished = dict.fromkeys(self._producers, 0)

    def send(self, target: str, data: bytes) -> None:
        """As ``Sender.send`` does it."""
        producer = self._producers[target]
        if not producer.try_put(data):
            raise WouldBlock(f"more is in flight to the {target} than its channel holds")
        self._unpublished[target] += 1
        if self._unpublished[target] == MESSAGES_PER_FLUSH:
            self._unpublished[target] = 0
            producer.flush()

    def receive(self) -> list[bytes]:
        for name, producer in self._producers.items():
            self._unpublished[name] = 0
            producer.flush()
        messages: list[bytes] = []
        while not messages:
            if self._bell.arm(self._consumers, ()):
                self._bell.wait()
            for consumer in self._consumers:
                messages += consumer.drain()
        return messages

    def close(self) -> None:
        ends: list[Any] = [*self._consumers, *self._producers.values(), self._bell]
        for end in ends:
            end.close()


@dataclass(frozen=True)
class ZmqNodeSpec:
    """One PULL socket for everything that comes in, one PUSH socket to each neighbour."""

    directory: str
    name: str
    neighbours: tuple[str, ...]

    def open(self) -> ZmqNode:
        return ZmqNode(self)


class ZmqNode:
    def __init__(self, spec: ZmqNodeSpec) -> None:
        import zmq  # an extra

        self._again, self._no_block = zmq.Again, zmq.NOBLOCK
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.bind(f"ipc://{spec.directory}/{spec.name}")
        self._outbox = {name: self._context.socket(zmq.PUSH) for name in spec.neighbours}
        for name, socket in self._outbox.items():
            socket.connect(f"ipc://{spec.directory}/{name}")

    def send(self, target: str, data: bytes) -> None:
        self._outbox[target].send(data)

    def receive(self) -> list[bytes]:
        messages = [self._inbox.recv()]
        try:
            while len(messages) < 64:
                messages.append(self._inbox.recv(self._no_block))
        except self._again:
            return messages
        return messages

    def close(self) -> None:
        for socket in (self._inbox, *self._outbox.values()):
            socket.close(linger=0)
        self._context.term()
