"""The doorbell page: one process's pid, phase, heartbeat and counters, mapped by its neighbours, beside its eventfd."""

from __future__ import annotations

import mmap
import os
import struct

from ringserve.shm.errors import AttachError, ChannelClosed, ForkedUse
from ringserve.shm.forks import FORKS

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


class BellPage:
    """A doorbell as its neighbours use it, whatever the transport."""

    def __init__(self, page_fd: int, event_fd: int) -> None:
        self._page = mmap.mmap(page_fd, PAGE_SIZE)
        if struct.unpack_from("=QI", self._page, MAGIC) != (BELL_MAGIC, LAYOUT_VERSION):
            self._page.close()
            raise AttachError("not a doorbell page of this layout version")
        # Aligned words: each is one load or store, which an observer in another process cannot see half done.
        self._words32 = memoryview(self._page).cast("I")
        self._words64 = memoryview(self._page).cast("Q")
        self._event_fd = os.dup(event_fd)
        self._generation = FORKS.generation

    def _check(self) -> None:
        if self._event_fd < 0:
            raise ChannelClosed("the doorbell is closed")
        if self._generation != FORKS.generation:
            raise ForkedUse("the doorbell was attached by another process")

    def ring(self) -> None:
        """Wake the owner."""
        self._check()
        self._words32[ASLEEP // 4] = 0
        try:
            os.eventfd_write(self._event_fd, 1)
        except BlockingIOError:
            return  # rung 2^64 - 2 times over: readable

    def words(self) -> tuple[int, int, int, int]:
        """pid, phase, heartbeat_ns, asleep."""
        self._check()
        words = self._words32
        return words[PID // 4], words[PHASE // 4], self._words64[HEARTBEAT_NS // 8], words[ASLEEP // 4]

    def is_open(self) -> bool:
        return self._event_fd >= 0 and self._generation == FORKS.generation

    def close(self) -> None:
        if self._event_fd >= 0:
            fd, self._event_fd = self._event_fd, -1
            os.close(fd)
            self._words32.release()
            self._words64.release()
            self._page.close()

    def __del__(self) -> None:
        if hasattr(self, "_event_fd"):
            self.close()
