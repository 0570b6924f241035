"""Looking at rings and doorbells from outside: the counters in their pages, mapped read-only.

The two ends of a ring and the owner of a doorbell write their counters with plain stores where they publish anyway, so
being observed costs them nothing, and an observer asks nobody.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass

from ringserve.shm.bell_page import ASLEEP, COUNTERS, COUNTERS_FORMAT, HEARTBEAT_NS, PAGE_SIZE
from ringserve.shm.descriptors import Descriptor


@dataclass(frozen=True)
class RingReading:
    """A ring's counters since it was made."""

    messages: int
    """Published by the producer."""
    bytes: int
    """Of those messages, without headers."""
    doorbells: int
    """Times the producer had to wake the consumer: system calls."""
    space_doorbells: int
    """Times the consumer woke a producer that waited for space."""
    full: int
    """Times the producer found no room."""
    used: int
    """Bytes waiting now, headers included."""
    high_water: int
    """Most bytes that the consumer ever found waiting."""
    capacity: int


@dataclass(frozen=True)
class DoorbellReading:
    """What a process's doorbell page tells."""

    pid: int
    phase: int
    heartbeat_ns: int
    asleep: bool
    sleeps: int
    """Arms after which it was safe to block."""
    refused_sleeps: int
    """Arms that found something."""
    waits: int
    wakes: int
    spurious_wakes: int
    spins: int
    """Arms that found something while spinning, before they would have slept."""


def _read_only(fd: int) -> Descriptor:
    """A second description of the same memory, without the right to write."""
    return Descriptor(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))


class RingObserverEnd:
    """Where a RingObserver comes from. Goes to a child as an argument of a spawned process."""

    def __init__(self, name: str, segment: Descriptor) -> None:
        self.name = name
        self.segment = segment

    @classmethod
    def of(cls, name: str, segment_fd: int) -> RingObserverEnd:
        return cls(name, _read_only(segment_fd))

    def attach(self) -> RingObserver:
        return RingObserver(self.name, self.segment.fileno())

    def close(self) -> None:
        self.segment.close()


class DoorbellObserverEnd:
    """Where a DoorbellObserver comes from. Goes to a child as an argument of a spawned process."""

    def __init__(self, name: str, page: Descriptor) -> None:
        self.name = name
        self.page = page

    @classmethod
    def of(cls, name: str, page_fd: int) -> DoorbellObserverEnd:
        return cls(name, _read_only(page_fd))

    def attach(self) -> DoorbellObserver:
        return DoorbellObserver(self.name, self.page.fileno())

    def close(self) -> None:
        self.page.close()


class _Page:
    """One page of somebody else's, mapped read-only."""

    def __init__(self, name: str, fd: int) -> None:
        self.name = name
        self._page = mmap.mmap(fd, PAGE_SIZE, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)

    def close(self) -> None:
        self._page.close()


class RingObserver(_Page):
    """Reads a ring's header page; the ring's data is not mapped."""

    def __init__(self, name: str, fd: int) -> None:
        super().__init__(name, fd)
        from ringserve.shm._ring import LAYOUT  # a ring exists: so does the extension

        self._offsets = {field: offset for field, (offset, _, _) in LAYOUT.items()}

    def read(self) -> RingReading:
        head = self._word("RING_HEAD")  # before the tail: what is used is never less than nothing
        return RingReading(
            messages=self._word("RING_PROD_MESSAGES"),
            bytes=self._word("RING_PROD_BYTES"),
            doorbells=self._word("RING_PROD_RINGS"),
            space_doorbells=self._word("RING_CONS_RINGS"),
            full=self._word("RING_PROD_FULL"),
            used=self._word("RING_TAIL") - head,
            high_water=self._word("RING_CONS_HIGH_WATER"),
            capacity=self._word("RING_CAPACITY"),
        )

    def _word(self, field: str) -> int:
        value: int = struct.unpack_from("=Q", self._page, self._offsets[field])[0]
        return value


class DoorbellObserver(_Page):
    """Reads a doorbell page."""

    def read(self) -> DoorbellReading:
        heartbeat_ns, phase, pid = struct.unpack_from("=QII", self._page, HEARTBEAT_NS)
        counters = struct.unpack_from(COUNTERS_FORMAT, self._page, COUNTERS)
        arms, refused, waits, wakes, spurious, spins = counters
        (asleep,) = struct.unpack_from("=I", self._page, ASLEEP)
        return DoorbellReading(
            pid, phase, heartbeat_ns, asleep != 0, arms - refused, refused, waits, wakes, spurious, spins
        )
