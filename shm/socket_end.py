"""A channel over a stream socket pair, for machines where the extension cannot be built: its frames, and what both
ends hold.

The stream is a row of frames with the ring's header. ``put`` collects frames, ``flush`` sends them in one system call,
and the consumer takes as many as there are in one. Readiness of the sockets is what wakes either side (SocketBell).
A stream and not datagrams, because a read that returns less than it was asked for says that nothing is left: nobody
has to ask once more, and find nothing, for every message.

The ends are in ``socket_producer.py`` and ``socket_consumer.py``.
"""

from __future__ import annotations

import select
import socket
import struct

from ringserve.shm.errors import ChannelClosed, ForkedUse
from ringserve.shm.forks import FORKS

WHOLE, FIRST, MIDDLE, LAST, CLOSE = range(5)
HEADER = struct.Struct("=II")
"""The payload's length; then the kind, eight bits of flags (0), and the sequence number in the upper half."""
TOTAL = struct.Struct("=Q")
"""Begins a first fragment: the whole message's length."""
NEXT, WORD, KIND_AND_FLAGS = 1 << 16, (1 << 32) - 1, (1 << 16) - 1
"""Of the header's second word: one more frame; all of it; all but the sequence number."""


class SocketEnd:
    """What both ends hold, and how a SocketBell's epoll watches them."""

    _events: int

    def __init__(self, name: str, sock: socket.socket, max_frame: int) -> None:
        self.name = name
        self.watched_by: select.epoll | None = None
        self.progress = 0
        """For spurious wake-ups: changes when a wake-up has led to something."""
        self._socket = sock
        self._open = True
        self._max_payload = max_frame - HEADER.size
        self._generation = FORKS.generation
        self._messages = self._bytes = self._system_calls = 0

    def _check(self) -> None:
        if not self._open:
            raise ChannelClosed("this end of the channel is closed")
        if self._generation != FORKS.generation:
            raise ForkedUse(f"channel {self.name} was attached by another process")

    def watch(self, epoll: select.epoll) -> None:
        """Let ``epoll``, and no other, tell when there is something for this end."""
        self.unwatch()
        if self._open:
            epoll.register(self._socket, self._events)
            self.watched_by = epoll

    def unwatch(self) -> None:
        """Must come before the descriptor is closed: the socket may live on in other descriptors, and the epoll
        watches sockets, not numbers. In a child of fork the registration is the parent's."""
        epoll, self.watched_by = self.watched_by, None
        if epoll is not None and not epoll.closed and self._generation == FORKS.generation:
            epoll.unregister(self._socket)

    def _release(self) -> None:
        if self._open:
            self.unwatch()
            self._open = False
            self._socket.close()

    def __del__(self) -> None:
        if hasattr(self, "_messages"):
            self._release()
