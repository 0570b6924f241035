"""The ends of a channel over a stream socket pair: for machines where the extension cannot be built.

The stream is a row of frames with the ring's header. ``put`` collects frames, ``flush`` sends them in one system call,
and the consumer takes as many as there are in one. Readiness of the sockets is what wakes either side (SocketBell).
A stream and not datagrams, because a read that returns less than it was asked for says that nothing is left: nobody
has to ask once more, and find nothing, for every message.

What was flushed is always sent. Half of what the kernel lets a socket buffer is kept in reserve: a producer that finds
the other half full sends what it holds out of the reserve, and takes no more until the consumer has made room.
"""

from __future__ import annotations

import select
import socket
import struct
from typing import Literal, NoReturn

from ringserve.shm.bell_page import BellPage
from ringserve.shm.errors import ChannelClosed, CorruptFrame, ForkedUse, MessageTooLarge, PeerDied, ShmError
from ringserve.shm.forks import FORKS
from ringserve.shm.roles import MAX_MESSAGE, Consumer, ConsumerStatistics, Producer, ProducerStatistics

WHOLE, FIRST, MIDDLE, LAST, CLOSE = range(5)
_HEADER = struct.Struct("=II")
"""The payload's length; then the kind, eight bits of flags (0), and the sequence number in the upper half."""
_TOTAL = struct.Struct("=Q")  # begins a first fragment
_pack, _unpack = _HEADER.pack, _HEADER.unpack_from
_NEXT, _WORD, _KIND_AND_FLAGS = 1 << 16, (1 << 32) - 1, (1 << 16) - 1

_DONT_WAIT = int(socket.MSG_DONTWAIT)
_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_BATCH = 32 * 1024
"""Bytes after which frames are sent before ``flush`` says so."""
_LARGE = 4 * 1024
"""Payloads from here on are not copied behind their header, but gathered by the kernel."""
_MAX_PIECES = 64
"""So many are gathered; more are joined."""
_READ = 64 * 1024
"""Bytes asked for at once."""
_RESERVED_SEND_BUFFER = 1 << 20
"""More than the kernel gives without privileges: as much as it gives."""


def split_send_buffer(sock: socket.socket, capacity: int) -> int:
    """Let ``sock`` buffer ``capacity`` bytes, but at most half of what the kernel would; what ``SO_SNDBUF`` is then."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _RESERVED_SEND_BUFFER)
    granted = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2  # the kernel doubles what it is told
    usual = min(capacity, granted // 2)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, usual)
    return usual


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
        self._max_payload = max_frame - _HEADER.size
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
        self._word = self._word + _NEXT & _WORD
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
        prefix = _TOTAL.pack(total) if offset == 0 else b""
        end = min(total, offset + self._max_payload - len(prefix))
        kind = FIRST if offset == 0 else LAST if end == total else MIDDLE
        self._held += (_pack(len(prefix) + end - offset, self._word | kind) + prefix, view[offset:end])
        self._word = self._word + _NEXT & _WORD
        self._held_bytes += _HEADER.size + len(prefix) + end - offset
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
            self._held_bytes += _HEADER.size
            self._set_send_buffer(_RESERVED_SEND_BUFFER)
            self._send_held()
        self._usable = False
        self._release()


class SocketConsumer(SocketEnd, Consumer):
    """A Consumer over a socket pair."""

    _events = select.EPOLLIN

    def __init__(self, name: str, sock: socket.socket, max_frame: int, peer: BellPage) -> None:
        super().__init__(name, sock, max_frame)
        self.unread = True
        """There may be something that nobody has looked at; the doorbell says so too."""
        self._peer = peer  # tells the pid of a producer that is gone
        self._receive = sock.recv
        self._chunk = b""  # what was read, and how far it was taken
        self._at = 0
        self._backlog = False  # the last drain left something behind because of its bounds
        self._word = 0  # the next frame's second header word, if it is a whole message
        self._assembly: list[bytes] | None = None
        self._assembly_left = 0
        self._peer_pid = 0
        self._end: ShmError | None = None
        self._ended = False  # the end, good or bad, was reported

    def drain(self, max_messages: int = 64, max_bytes: int = 65536) -> list[bytes]:
        if self._generation != FORKS.generation or not self._open or self._end is not None:
            self._check()
            self._raise_end()
        chunk = self._chunk
        looked = not chunk
        if looked:
            chunk = self._read()
            size = len(chunk)
            if size >= 8:  # nearly always exactly one whole message: without the loop, this takes half of the time
                length, found = _unpack(chunk)
                if length + 8 == size and found == self._word and self._assembly is None:
                    self._word = found + _NEXT & _WORD
                    self.progress += size
                    self._messages += 1
                    self._bytes += length
                    return [chunk[8:]]
        messages: list[bytes] = []
        self._take(chunk, looked, messages, max_messages, max_bytes)
        if self._end is not None:
            self.unread = True
            if not messages:
                self._raise_end()
        return messages

    def _read(self) -> bytes:
        """What is there, at most ``_READ`` bytes; b"": nothing, perhaps for good."""
        self._backlog = False
        try:
            chunk = self._receive(_READ, _DONT_WAIT)
        except BlockingIOError:
            self.unread = False
            if self._peer_pid:
                self._end = PeerDied(self.name, self._peer_pid)
            return b""
        except ConnectionResetError:
            chunk = b""
        if not chunk:  # every descriptor of the producer's end is gone, without a closing frame
            self._end = PeerDied(self.name, self._peer_pid or self._peer.words()[0])
        self.unread = len(chunk) == _READ or self._peer_pid != 0  # a shorter one was all there was
        return chunk

    def _take(self, chunk: bytes, looked: bool, messages: list[bytes], max_messages: int, max_bytes: int) -> None:
        """Take frames out of ``chunk`` and what follows it, within the bounds. ``looked``: it was read just now."""
        at, word, longest = self._at, self._word, self._max_payload
        begin, size = at, len(chunk)
        within = True
        while within:
            while within and at + 8 <= size:
                length, found = _unpack(chunk, at)
                stop = at + 8 + length
                if found == word and length <= longest and self._assembly is None:
                    if stop > size:
                        break
                    messages.append(chunk[at + 8 : stop])
                    self._messages += 1
                    self._bytes += length
                elif not self._take_other(length, found, word, chunk[at + 8 : stop], messages):
                    break
                at = stop
                word = word + _NEXT & _WORD
                within = at - begin < max_bytes and len(messages) < max_messages
            self.progress += at - begin
            max_bytes -= at - begin
            if not within or self._end is not None or ((looked or messages) and not self.unread):
                break
            looked = True
            more = self._read()
            chunk = chunk[at:] + more if at < size else more
            begin, at, size = 0, 0, len(chunk)
        if at == size:
            chunk, at = b"", 0
        elif not within:
            self._backlog = self.unread = True
        self._chunk, self._at, self._word = chunk, at, word

    def _raise_end(self) -> NoReturn:
        assert self._end is not None
        self._ended, self.unread = True, False
        self.unwatch()
        raise self._end.with_traceback(None)

    def _take_other(self, length: int, found: int, word: int, payload: bytes, messages: list[bytes]) -> bool:
        """A frame that is not simply a whole message. False: it is not all there yet, or the channel has ended."""
        kind = found & _KIND_AND_FLAGS
        inside = kind in (MIDDLE, LAST)
        if length > self._max_payload:
            return self._corrupt("a frame is longer than a frame may be")
        if found - kind != word:
            return self._corrupt("a frame has the wrong sequence number")
        if kind > CLOSE:
            return self._corrupt("a frame is of an unknown kind")
        if kind == CLOSE and self._assembly is not None:
            return self._corrupt("the producer closed in the middle of a message")
        if kind != CLOSE and inside != (self._assembly is not None):
            return self._corrupt(
                "a fragment without a beginning" if inside else "a fragmented message was not finished"
            )
        if kind == CLOSE:
            self._end = ChannelClosed(f"channel {self.name}: the producer closed")
            return False
        return len(payload) == length and self._take_fragment(kind, payload, messages)

    def _take_fragment(self, kind: int, payload: bytes, messages: list[bytes]) -> bool:
        if kind == FIRST:
            if len(payload) < _TOTAL.size:
                return self._corrupt("a first fragment is too short")
            self._assembly, self._assembly_left = [], _TOTAL.unpack_from(payload)[0]
            if self._assembly_left > MAX_MESSAGE:
                return self._corrupt("a fragmented message has an impossible length")
            payload = payload[_TOTAL.size :]
        assert self._assembly is not None
        self._assembly.append(payload)
        self._assembly_left -= len(payload)
        self._bytes += len(payload)
        if self._assembly_left < 0 or (kind == LAST) != (self._assembly_left == 0):
            return self._corrupt("a fragmented message has another length than announced")
        if kind == LAST:
            self._messages += 1
            messages.append(b"".join(self._assembly))
            self._assembly = None
        return True

    def _corrupt(self, what: str) -> Literal[False]:
        self._end = CorruptFrame(f"channel {self.name}: {what}")
        return False

    def ready(self) -> bool:
        """For ``arm``, where something may be unread: ``drain`` would return or raise something new."""
        if self._ended or not self._open:
            self.unread = False
            return False
        if self._end is not None or self._peer_pid or self._backlog:
            return True
        try:
            self._receive(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        except BlockingIOError:
            self.unread = False
            return False
        except ConnectionResetError:
            return True
        return True

    def watch(self, epoll: select.epoll) -> None:
        if not self._ended:  # an end that was reported keeps nobody awake
            super().watch(epoll)

    def mark_peer_dead(self, pid: int, /) -> None:
        self._check()
        self._peer_pid = pid
        self.unread = True

    def statistics(self) -> ConsumerStatistics:
        return ConsumerStatistics(self._messages, self._bytes, 0, 0, 0)

    def close(self) -> None:
        if self._open and self._generation == FORKS.generation:
            self._socket.shutdown(socket.SHUT_RDWR)  # the descriptor may have copies; this closes for all of them
        self._release()

    def _release(self) -> None:
        super()._release()
        self._peer.close()
