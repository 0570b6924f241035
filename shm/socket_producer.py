"""The sending end of a channel over a stream socket pair.

What was flushed is always sent. Half of what the kernel lets a socket buffer is kept in reserve: a producer that finds
the other half full sends what it holds out of the reserve, and takes no more until the consumer has made room.
"""

from __future__ import annotations

import select
import socket

from ringserve.shm.errors import ChannelClosed, MessageTooLarge, ShmError
from ringserve.shm.forks import FORKS
from ringserve.shm.roles import MAX_MESSAGE, Producer, ProducerStatistics
from ringserve.shm.socket_end import CLOSE, FIRST, HEADER, LAST, MIDDLE, NEXT, TOTAL, WORD, SocketEnd

_pack = HEADER.pack
_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_BATCH = 32 * 1024
"""Bytes after which frames are sent before ``flush`` says so."""
_LARGE = 4 * 1024
"""Payloads from here on are not copied behind their header, but gathered by the kernel."""
_MAX_PIECES = 64
"""So many are gathered; more are joined."""
_RESERVED_SEND_BUFFER = 1 << 20
"""More than the kernel gives without privileges: as much as it gives."""


def split_send_buffer(sock: socket.socket, capacity: int) -> int:
    """Let ``sock`` buffer ``capacity`` bytes, but at most half of what the kernel would; what ``SO_SNDBUF`` is then."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _RESERVED_SEND_BUFFER)
    granted = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2  # the kernel doubles what it is told
    usual = min(capacity, granted // 2)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, usual)
    return usual


class SocketProducer(SocketEnd, Producer):
    """A Producer over a socket pair."""

    _events = select.EPOLLOUT

    def __init__(self, name: str, sock: socket.socket, max_frame: int, send_buffer: int) -> None:
        super().__init__(name, sock, max_frame)
        self.waiting = False
        """There was no room, and nothing was put since."""
        self._send_buffer = send_buffer
        self._send, self._gather = sock.send, sock.sendmsg
        self._room = select.poll()
        self._room.register(sock, select.POLLOUT)
        self._held: list[bytes | memoryview] = []  # frames that were put and are not sent
        self._held_bytes = 0
        self._word = 0  # the next frame's second header word, if it is a whole message
        self._usable = True  # not full, nor in the middle of a message, nor closed by the consumer
        self._full = False  # the last frames went into the reserve
        self._peer_closed = False
        self._part_offset = self._part_total = 0
        self._times_full = 0

    @property
    def max_payload(self) -> int:
        return self._max_payload

    def try_put(self, data: bytes | bytearray | memoryview, /) -> bool:
        if (self._generation != FORKS.generation or not self._usable) and not self._becomes_usable():
            return False
        length = len(data) if type(data) is bytes else memoryview(data).nbytes
        if length > self._max_payload:
            raise MessageTooLarge(
                f"channel {self.name}: {length} bytes do not fit one frame ({self._max_payload}); put it in parts"
            )
        header = _pack(length, self._word)
        if length < _LARGE or type(data) is not bytes:
            self._held.append(header + data)
        else:
            self._held += (header, data)
        self._word = self._word + NEXT & WORD
        self._held_bytes += 8 + length
        self._messages += 1
        self._bytes += length
        if self._held_bytes >= _BATCH:
            self._send_held()
        return True

    def put_part(self, data: bytes | bytearray | memoryview, offset: int, /) -> int:
        self._check()
        view = memoryview(data).cast("B")
        total = view.nbytes
        if total > MAX_MESSAGE:
            raise MessageTooLarge(
                f"channel {self.name}: {total} bytes are more than a message may have ({MAX_MESSAGE})"
            )
        expected = (self._part_offset, self._part_total) if self._part_total else (0, total)
        if total <= self._max_payload or (offset, total) != expected:
            raise ValueError("not the next part of a message longer than a frame")
        while offset < total and self._has_room():
            offset = self._put_fragment(view, offset)
        if offset == total:
            self._messages += 1
            self._part_offset = self._part_total = 0
        else:
            self._part_offset = offset
            self._part_total = total if offset else 0
        self._usable = not (self._full or self._peer_closed or self._part_total)
        return offset

    def _put_fragment(self, view: memoryview, offset: int) -> int:
        """Send it, behind what is held; the next offset."""
        total = view.nbytes
        prefix = TOTAL.pack(total) if offset == 0 else b""
        end = min(total, offset + self._max_payload - len(prefix))
        kind = FIRST if offset == 0 else LAST if end == total else MIDDLE
        self._held += (_pack(len(prefix) + end - offset, self._word | kind) + prefix, view[offset:end])
        self._word = self._word + NEXT & WORD
        self._held_bytes += HEADER.size + len(prefix) + end - offset
        self._bytes += end - offset
        self._send_held()
        return end

    def flush(self) -> None:
        if self._generation != FORKS.generation or not self._open:
            self._check()
        if self._held and not (self._full and not self._regains_room()):
            self._send_held()

    def _send_held(self) -> None:
        held, size = self._held, self._held_bytes
        if not held:
            return
        self._held, self._held_bytes = [], 0
        self._system_calls += 1
        try:
            if len(held) == 1:
                sent = self._send(held[0], _FLAGS)
            elif size < _BATCH or len(held) > _MAX_PIECES:
                sent = self._send(b"".join(held), _FLAGS)
            else:
                sent = self._gather(held, (), _FLAGS)
        except BlockingIOError:
            sent = 0
        except (BrokenPipeError, ConnectionResetError):
            self._lose_peer()
            return
        if sent < size:
            self._use_reserve(b"".join(held)[sent:])

    def _use_reserve(self, rest: bytes) -> None:
        """What was flushed must not depend on a later call. Should the reserve not be what it was when the channel was
        made, the rest is held, and goes out as soon as there is room."""
        self._full, self._usable = True, False
        self._set_send_buffer(_RESERVED_SEND_BUFFER)
        try:
            sent = self._send(rest, _FLAGS)
        except BlockingIOError:
            sent = 0
        except (BrokenPipeError, ConnectionResetError):
            self._lose_peer()
            return
        self._set_send_buffer(self._send_buffer)
        if sent < len(rest):
            self._held, self._held_bytes, self.waiting = [rest[sent:]], len(rest) - sent, True

    def _set_send_buffer(self, size: int) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)

    def _lose_peer(self) -> None:
        """Nobody reads any more; the next put says so."""
        self._peer_closed, self._usable, self._full = True, False, False
        self._held, self._held_bytes = [], 0
        self._stop_waiting()

    def _stop_waiting(self) -> None:
        self.progress += self.waiting
        self.waiting = False
        self.unwatch()

    def _becomes_usable(self) -> bool:
        """False if there is no room."""
        self._check()
        if self._part_total:
            raise ShmError(f"channel {self.name}: a message put in parts is not complete")
        self._usable = self._has_room()
        return self._usable

    def _has_room(self) -> bool:
        """When there is none, the doorbell will be rung when there is some."""
        if self._full and not self._regains_room():
            self.waiting = True
            self._times_full += 1
            return False
        if self._peer_closed:
            raise ChannelClosed(f"channel {self.name}: the consumer closed")
        return True

    def _regains_room(self) -> bool:
        """After the reserve was used: False while the usual half is not mostly free (the kernel says when)."""
        events = self._room.poll(0)
        if not events:
            return False
        if events[0][1] & ~select.POLLOUT:
            self._lose_peer()
            return True
        self._full = False
        self._stop_waiting()
        self._send_held()
        return not self._full

    def ready(self) -> bool:
        """For ``arm``, of a producer that waits: there is room, or nobody reads any more."""
        return bool(self._room.poll(0))

    def statistics(self) -> ProducerStatistics:
        return ProducerStatistics(self._messages, self._bytes, self._times_full, self._system_calls, 0)

    def close(self) -> None:
        if self._open and self._generation == FORKS.generation:
            self._held.append(_pack(0, self._word | CLOSE))
            self._held_bytes += HEADER.size
            self._set_send_buffer(_RESERVED_SEND_BUFFER)
            self._send_held()
        self._usable = False
        self._release()
