"""Channels: one direction between two processes.

The creator (the supervisor) makes the doorbells and the channels, hands the ends to the processes it spawns, and
closes its own descriptors. An end is attached in the process that uses it.
"""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass
from typing import Literal

from ringserve.shm.bell_page import PAGE_SIZE
from ringserve.shm.descriptors import Descriptor, create_sealed_memfd
from ringserve.shm.doorbell import DoorbellHandle
from ringserve.shm.observer import RingObserverEnd
from ringserve.shm.roles import Consumer, Producer
from ringserve.shm.socket_consumer import SocketConsumer
from ringserve.shm.socket_producer import SocketProducer, split_send_buffer
from ringserve.shm.support import Transport, choose_transport

MIN_CAPACITY = 64 * 1024
MAX_CAPACITY = 1 << 30
MAX_FRAME = 64 * 1024


@dataclass(frozen=True)
class RingCarrier:
    """A ring segment, and what its header must say."""

    segment: Descriptor
    capacity: int
    max_frame: int
    ring_id: int
    session_id: int

    def open_producer(self, name: str, peer: DoorbellHandle) -> Producer:
        from ringserve.shm._ring import Bell
        from ringserve.shm.ring_ends import RingProducer

        bell = Bell(*peer.filenos())
        agreed = (self.capacity, self.max_frame, self.ring_id, self.session_id)
        return RingProducer(name, self.segment.fileno(), bell, *agreed)

    def open_consumer(self, name: str, peer: DoorbellHandle) -> Consumer:
        from ringserve.shm._ring import Bell
        from ringserve.shm.ring_ends import RingConsumer

        bell = Bell(*peer.filenos())
        agreed = (self.capacity, self.max_frame, self.ring_id, self.session_id)
        return RingConsumer(name, self.segment.fileno(), bell, *agreed)

    def close(self) -> None:
        self.segment.close()


@dataclass(frozen=True)
class SocketCarrier:
    """One socket of a pair, and what the kernel buffers between them."""

    end: Descriptor
    max_frame: int
    send_buffer: int

    def open_producer(self, name: str, peer: DoorbellHandle) -> Producer:
        return SocketProducer(name, self._socket(), self.max_frame, self.send_buffer)

    def open_consumer(self, name: str, peer: DoorbellHandle) -> Consumer:
        return SocketConsumer(name, self._socket(), self.max_frame, peer.open_page())

    def _socket(self) -> socket.socket:
        return socket.socket(fileno=os.dup(self.end.fileno()))

    def close(self) -> None:
        self.end.close()


@dataclass(frozen=True)
class ProducerEnd:
    """Where a Producer comes from: ``Producer.attach(end)``. Goes to a child as an argument of a spawned Process."""

    name: str
    carrier: RingCarrier | SocketCarrier
    peer: DoorbellHandle
    """The consumer's doorbell."""

    def open(self) -> Producer:
        return self.carrier.open_producer(self.name, self.peer)

    def close(self) -> None:
        """Drop this process's descriptors of the channel (the doorbell's handle is not the channel's)."""
        self.carrier.close()


@dataclass(frozen=True)
class ConsumerEnd:
    """Where a Consumer comes from: ``Consumer.attach(end)``. Goes to a child as an argument of a spawned Process."""

    name: str
    carrier: RingCarrier | SocketCarrier
    peer: DoorbellHandle
    """The producer's doorbell."""

    def open(self) -> Consumer:
        return self.carrier.open_consumer(self.name, self.peer)

    def close(self) -> None:
        """Drop this process's descriptors of the channel (the doorbell's handle is not the channel's)."""
        self.carrier.close()


@dataclass(frozen=True)
class ChannelHandle:
    """A channel as its creator sees it."""

    name: str
    transport: Literal["ring", "socket"]
    producer_end: ProducerEnd
    consumer_end: ConsumerEnd

    def observer(self) -> RingObserverEnd | None:
        """For a process that shows the ring's counters; None for sockets, which have no common page."""
        carrier = self.producer_end.carrier
        return RingObserverEnd.of(self.name, carrier.segment.fileno()) if isinstance(carrier, RingCarrier) else None

    def close(self) -> None:
        """Drop the creator's descriptors: after the children were started. The channel lives in its ends' processes."""
        self.producer_end.close()
        self.consumer_end.close()


def create_channel(
    name: str,
    *,
    producer: DoorbellHandle,
    consumer: DoorbellHandle,
    capacity: int = 1 << 20,
    transport: Transport = "auto",
) -> ChannelHandle:
    """A new channel from the process of ``producer`` to the process of ``consumer`` (their doorbells).

    ``capacity`` is a power of two from 64 KiB to 1 GiB, in bytes; a frame takes at most an eighth of it. The doorbells
    must be of the same transport; ``auto`` is theirs. Raises ValueError when they are not, TransportUnavailable, and
    OSError when there is no memory for it.
    """
    if not MIN_CAPACITY <= capacity <= MAX_CAPACITY or capacity & (capacity - 1):
        raise ValueError(f"capacity must be a power of two from 64 KiB to 1 GiB, not {capacity}")
    max_frame = min(MAX_FRAME, capacity // 8)
    chosen = producer.transport if transport == "auto" else choose_transport(transport)
    for doorbell in (producer, consumer):
        if doorbell.transport != chosen:
            raise ValueError(
                f"channel {name}: its transport is {chosen!r}, but the doorbell {doorbell.name!r} was made for "
                f"{doorbell.transport!r}"
            )
    sending: RingCarrier | SocketCarrier
    receiving: RingCarrier | SocketCarrier
    if chosen == "ring":
        sending = receiving = _create_ring(name, capacity, max_frame)
    else:
        sending, receiving = _create_socket_pair(capacity, max_frame)
    return ChannelHandle(name, chosen, ProducerEnd(name, sending, consumer), ConsumerEnd(name, receiving, producer))


def _create_ring(name: str, capacity: int, max_frame: int) -> RingCarrier:
    from ringserve.shm._ring import format_ring

    segment = Descriptor(create_sealed_memfd(f"ringserve-ring-{name}", PAGE_SIZE + capacity))
    ring_id, session_id = secrets.randbits(32), secrets.randbits(64)
    format_ring(segment.fileno(), capacity, max_frame, ring_id, session_id)
    return RingCarrier(segment, capacity, max_frame, ring_id, session_id)


def _create_socket_pair(capacity: int, max_frame: int) -> tuple[SocketCarrier, SocketCarrier]:
    sending, receiving = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    send_buffer = split_send_buffer(sending, capacity)
    return (
        SocketCarrier(Descriptor(sending.detach()), max_frame, send_buffer),
        SocketCarrier(Descriptor(receiving.detach()), max_frame, send_buffer),
    )
