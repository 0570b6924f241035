"""A doorbell without the C extension: eventfd, and a page that only carries pid, phase and heartbeat.

Senders of the socket transport always write the eventfd, so the word ``asleep`` is not needed.
"""

from __future__ import annotations

import math
import mmap
import os
import select
import struct
from collections.abc import Sequence
from typing import Any

from ringserve.shm.errors import AttachError, ChannelClosed, ForkedUse, ShmError

PAGE_SIZE = 4096
BELL_MAGIC = 0x316C6C6562767372
LAYOUT_VERSION = 2
# Offsets in the page; _layout.h has the picture.
MAGIC, VERSION, ASLEEP, HEARTBEAT_NS, PHASE, PID, COUNTERS = 0x000, 0x008, 0x080, 0x100, 0x108, 0x10C, 0x110
COUNTERS_FORMAT = "=6Q"
"""arms, refused arms, waits, wakes, spurious wakes, spins."""


def format_bell(fd: int) -> None:
    """Write a new doorbell page's header."""
    os.pwrite(fd, struct.pack("=QI", BELL_MAGIC, LAYOUT_VERSION), MAGIC)


class PurePythonBell:
    """The interface of ``_ring.Bell``."""

    def __init__(self, page_fd: int, event_fd: int) -> None:
        self._page = mmap.mmap(page_fd, PAGE_SIZE)
        if struct.unpack_from("=QI", self._page, MAGIC) != (BELL_MAGIC, LAYOUT_VERSION):
            self._page.close()
            raise AttachError("not a doorbell page of this layout version")
        self._event_fd = os.dup(event_fd)
        self._process = os.getpid()
        self._waiting = 0  # threads inside wait()
        self._arms = self._refused_arms = self._waits = self._wakes = self._rings = self._spurious_wakes = 0
        self._progress = 0
        self._woken = False

    def _check(self) -> None:
        if self._event_fd < 0:
            raise ChannelClosed("the doorbell is closed")
        if self._process != os.getpid():
            raise ForkedUse("the doorbell was attached by another process")

    def claim(self, pid: int) -> None:
        self._check()
        owner: int = struct.unpack_from("=I", self._page, PID)[0]
        if owner:
            raise AttachError(f"the doorbell belongs to process {owner}")
        struct.pack_into("=I", self._page, PID, pid)

    def fileno(self) -> int:
        self._check()
        return self._event_fd

    def ring(self) -> None:
        self._check()
        try:
            os.eventfd_write(self._event_fd, 1)
        except BlockingIOError:
            return  # rung 2^64 - 2 times over: readable
        self._rings += 1

    def clear(self) -> None:
        self._check()
        try:
            os.eventfd_read(self._event_fd)
        except BlockingIOError:
            return
        self._wakes += 1
        self._woken = True

    def arm(self, consumers: Sequence[Any], producers: Sequence[Any]) -> bool:
        self._check()
        self._arms += 1
        ready = any(end.ready() for end in consumers) or any(end.ready() for end in producers)
        if ready:
            self._refused_arms += 1
        else:
            progress = sum(end.progress() for end in (*consumers, *producers))
            self._spurious_wakes += self._woken and progress == self._progress
            self._progress, self._woken = progress, False
        counters = (self._arms, self._refused_arms, self._waits, self._wakes, self._spurious_wakes, 0)
        struct.pack_into(COUNTERS_FORMAT, self._page, COUNTERS, *counters)
        return not ready

    def set_spin(self, nanoseconds: int) -> None:
        """A socket cannot be looked at without a system call: this one never spins."""
        self._check()

    def disarm(self) -> None:
        self._check()

    def wait(self, timeout: float | None, watch: Sequence[int]) -> tuple[int, ...]:
        self._check()
        self._waits += 1
        poll = select.poll()
        for fd in (self._event_fd, *watch):
            poll.register(fd, select.POLLIN)
        self._waiting += 1
        try:
            ready = dict(poll.poll(None if timeout is None else math.ceil(max(timeout, 0.0) * 1e3)))
        finally:
            self._waiting -= 1
        if any(events & select.POLLNVAL for events in ready.values()):
            raise OSError("a watched file descriptor is closed")
        if self._event_fd in ready:
            self.clear()
        return tuple(fd for fd in watch if fd in ready)

    def beat(self, now_ns: int) -> None:
        self._check()
        struct.pack_into("=Q", self._page, HEARTBEAT_NS, now_ns)

    def set_phase(self, phase: int) -> None:
        self._check()
        struct.pack_into("=I", self._page, PHASE, phase)

    def words(self) -> tuple[int, int, int, int]:
        self._check()
        heartbeat_ns, phase, pid = struct.unpack_from("=QII", self._page, HEARTBEAT_NS)
        return pid, phase, heartbeat_ns, struct.unpack_from("=I", self._page, ASLEEP)[0]

    def counters(self) -> tuple[int, int, int, int, int, int, int]:
        return self._arms, self._refused_arms, self._waits, self._wakes, self._rings, self._spurious_wakes, 0

    def is_open(self) -> bool:
        return self._event_fd >= 0 and self._process == os.getpid()

    def close(self) -> None:
        if self._waiting:
            raise ShmError("a thread is waiting on the doorbell")
        if self._event_fd >= 0:
            fd, self._event_fd = self._event_fd, -1
            os.close(fd)
            self._page.close()

    def __del__(self) -> None:
        if hasattr(self, "_event_fd"):
            self.close()
