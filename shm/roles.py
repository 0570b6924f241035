"""The two ends of a channel, whatever carries it. A channel has exactly one producer and one consumer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringserve.shm.errors import WouldBlock

if TYPE_CHECKING:
    from ringserve.shm.channel import ConsumerEnd, ProducerEnd

MAX_MESSAGE = 64 * 1024 * 1024
"""Bytes a message may have, all fragments together."""


@dataclass(frozen=True)
class ProducerStatistics:
    """Of one end, since it was attached."""

    messages: int
    bytes: int
    full: int
    """How often there was no room."""
    doorbell_writes: int
    """System calls that woke the consumer; over sockets all that may have: every send."""
    used: int
    """Bytes put and not yet consumed, headers included (0 for sockets, which do not tell)."""


@dataclass(frozen=True)
class ConsumerStatistics:
    """Of one end, since it was attached."""

    messages: int
    bytes: int
    doorbell_writes: int
    """How often a producer that waited for space was woken (0 for sockets: the kernel does that)."""
    used: int
    """Bytes published and not yet consumed, headers included."""
    high_water: int
    """Most bytes ever found waiting (0 for sockets, which do not tell)."""


class Producer(ABC):
    """Puts messages in. Nothing here ever blocks."""

    __slots__ = ()

    @staticmethod
    def attach(end: ProducerEnd) -> Producer:
        """Open this end in this process. A ring's end can be attached once; AttachError otherwise."""
        return end.open()

    @property
    @abstractmethod
    def max_payload(self) -> int:
        """Longest message of one frame, in bytes."""

    @abstractmethod
    def try_put(self, data: bytes | bytearray | memoryview, /) -> bool:
        """Put a message of one frame. False if there is no room now: then this process's doorbell will be rung when
        there is (``arm`` takes the producers). Raises MessageTooLarge, and ChannelClosed: over sockets perhaps only
        after the next ``flush``."""

    def put_nowait(self, data: bytes | bytearray | memoryview) -> None:
        """Put a message of at most ``max_payload`` bytes, whole or not at all; WouldBlock if there is no room.
        ``Sender`` and ``put_part`` take longer ones."""
        if not self.try_put(data):
            raise WouldBlock("the channel is full")

    @abstractmethod
    def put_part(self, data: bytes | bytearray | memoryview, offset: int, /) -> int:
        """Put as many fragments as fit of a message longer than ``max_payload``, from ``offset`` on (0, then what the
        last call returned); returns the new offset. No other message may be put before it is complete."""

    @abstractmethod
    def flush(self) -> None:
        """Let the consumer see what was put, and wake it if it sleeps. Once for each turn of the owner's loop."""

    @abstractmethod
    def statistics(self) -> ProducerStatistics: ...

    @abstractmethod
    def close(self) -> None:
        """Flush, and close: the consumer gets ChannelClosed after the last message."""


class Consumer(ABC):
    """Takes messages out. Nothing here ever blocks."""

    __slots__ = ()

    @staticmethod
    def attach(end: ConsumerEnd) -> Consumer:
        """Open this end in this process. A ring's end can be attached once; AttachError otherwise."""
        return end.open()

    @abstractmethod
    def drain(self, max_messages: int = 64, max_bytes: int = 65536) -> list[bytes]:
        """The complete messages that are there, within the bounds (at least one frame is taken if there is one).
        An empty list does not mean that there is nothing: fragments may have been taken; ``arm`` knows.
        When there is nothing more for good: ChannelClosed, PeerDied or CorruptFrame."""

    @abstractmethod
    def mark_peer_dead(self, pid: int, /) -> None:
        """The producer's process ended (its pidfd said so): after the last message, ``drain`` raises PeerDied."""

    @abstractmethod
    def statistics(self) -> ConsumerStatistics: ...

    @abstractmethod
    def close(self) -> None:
        """Close: the producer gets ChannelClosed."""
