"""The ends of a channel over a SOCK_SEQPACKET pair: for machines where the extension cannot be built.

One datagram is one frame with the ring's header. Frames are visible as soon as they are put; ``flush`` writes the
consumer's eventfd. A producer that finds no room writes the channel's second eventfd ("want space"), tries once more,
and is rung by the consumer's next drain: the eventfd's lock in the kernel takes the place of the ring's fences.
"""

from __future__ import annotations

import os
import socket
import struct

from ringserve.shm.errors import ChannelClosed, CorruptFrame, ForkedUse, MessageTooLarge, PeerDied, ShmError
from ringserve.shm.fallback import PurePythonBell
from ringserve.shm.roles import MAX_MESSAGE, Consumer, ConsumerStatistics, Producer, ProducerStatistics

WHOLE, FIRST, MIDDLE, LAST, CLOSE = range(5)
_HEADER = struct.Struct("=IBBH")  # payload's length, kind, flags, sequence number
_TOTAL = struct.Struct("=Q")  # begins a first fragment

FULL_SEND_BUFFER = 1 << 20


class _SocketEnd:
    """What both ends hold."""

    def __init__(self, name: str, sock: socket.socket, want_fd: int, peer: PurePythonBell, max_frame: int) -> None:
        self.name = name
        self._socket = sock
        self._want_fd = want_fd
        self._peer = peer
        self._max_frame = max_frame
        self._process = os.getpid()
        self._sequence = 0
        self._messages = self._bytes = self._doorbell_writes = 0

    def _check(self) -> None:
        if self._want_fd < 0:
            raise ChannelClosed("this end of the channel is closed")
        if self._process != os.getpid():
            raise ForkedUse(f"channel {self.name} was attached by another process")

    def _ring_peer(self) -> None:
        self._peer.ring()
        self._doorbell_writes += 1

    def _release(self) -> None:
        if self._want_fd >= 0:
            fd, self._want_fd = self._want_fd, -1
            os.close(fd)
            self._socket.close()
            self._peer.close()

    def __del__(self) -> None:
        if hasattr(self, "_want_fd"):
            self._release()


class SocketProducer(_SocketEnd, Producer):
    """A Producer over a socket pair."""

    def __init__(self, name: str, sock: socket.socket, want_fd: int, peer: PurePythonBell, max_frame: int) -> None:
        super().__init__(name, sock, want_fd, peer, max_frame)
        self._dirty = False
        self._waiting = False
        self._part_offset = self._part_total = 0
        self._full = self._resumed = 0

    @property
    def max_payload(self) -> int:
        return self._max_frame - _HEADER.size

    def _send(self, kind: int, *payload: bytes | bytearray | memoryview) -> bool:
        length = sum(memoryview(piece).nbytes for piece in payload)
        frame = (_HEADER.pack(length, kind, 0, self._sequence & 0xFFFF), *payload)
        try:
            self._socket.sendmsg(frame, (), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            self._waiting = False
            raise ChannelClosed(f"channel {self.name}: the consumer closed") from None
        self._sequence += 1
        self._dirty = True
        self._resumed += self._waiting
        self._waiting = False
        return True

    def _send_or_want(self, kind: int, *payload: bytes | bytearray | memoryview) -> bool:
        if self._send(kind, *payload):
            return True
        self.flush()
        os.eventfd_write(self._want_fd, 1)
        if self._send(kind, *payload):
            return True
        self._waiting = True
        self._full += 1
        return False

    def try_put(self, data: bytes | bytearray | memoryview, /) -> bool:
        self._check()
        if self._part_total:
            raise ShmError(f"channel {self.name}: a message put in parts is not complete")
        length = memoryview(data).nbytes
        if length > self.max_payload:
            raise MessageTooLarge(
                f"channel {self.name}: {length} bytes do not fit one frame ({self.max_payload}); put it in parts"
            )
        if not self._send_or_want(WHOLE, data):
            return False
        self._messages += 1
        self._bytes += length
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
        if total <= self.max_payload or (offset, total) != expected:
            raise ValueError("not the next part of a message longer than a frame")
        while offset < total and self._put_fragment(view, offset):
            offset = self._part_offset
        if offset == total:
            self._messages += 1
            self._part_offset = self._part_total = 0
        return offset

    def _put_fragment(self, view: memoryview, offset: int) -> bool:
        total = view.nbytes
        if offset == 0:
            end = self.max_payload - _TOTAL.size
            sent = self._send_or_want(FIRST, _TOTAL.pack(total), view[:end])
        else:
            end = min(total, offset + self.max_payload)
            sent = self._send_or_want(LAST if end == total else MIDDLE, view[offset:end])
        if sent:
            self._part_offset, self._part_total = end, total
            self._bytes += end - offset
        return sent

    def flush(self) -> None:
        self._check()
        if self._dirty:
            self._dirty = False
            self._ring_peer()

    def ready(self) -> bool:
        """For ``arm``: a producer that waits for space is rung, always; there is nothing to look at."""
        return False

    def progress(self) -> int:
        """Changes when a producer that waited for space has put something."""
        return self._resumed

    def statistics(self) -> ProducerStatistics:
        return ProducerStatistics(self._messages, self._bytes, self._full, self._doorbell_writes, 0)

    def close(self) -> None:
        if self._want_fd >= 0 and self._process == os.getpid():
            # Half of what a socket may buffer was kept back, so that the last frame fits even when it is full.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, FULL_SEND_BUFFER)
            try:
                self._send(CLOSE)
            except ChannelClosed:
                self._dirty = False  # nobody reads any more
            self.flush()
        self._release()


class SocketConsumer(_SocketEnd, Consumer):
    """A Consumer over a socket pair."""

    def __init__(self, name: str, sock: socket.socket, want_fd: int, peer: PurePythonBell, max_frame: int) -> None:
        super().__init__(name, sock, want_fd, peer, max_frame)
        self._buffer = bytearray(max_frame + 1)
        self._view = memoryview(self._buffer)
        self._assembly: bytearray | None = None
        self._assembly_size = 0
        self._peer_pid = 0
        self._end: ShmError | None = None
        self._ended = False

    def drain(self, max_messages: int = 64, max_bytes: int = 65536) -> list[bytes]:
        self._check()
        messages: list[bytes] = []
        taken = 0
        while self._end is None and len(messages) < max_messages and taken < max_bytes:
            try:
                length = self._socket.recv_into(self._buffer, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if self._peer_pid:
                    self._end = PeerDied(self.name, self._peer_pid)
                break
            except ConnectionResetError:
                length = 0
            taken += length
            try:
                self._take(length, messages)
            except ShmError as error:
                self._end = error
        if taken:
            self._give_space()
        if not messages and self._end is not None:
            self._ended = True
            raise self._end.with_traceback(None)
        return messages

    def _take(self, length: int, messages: list[bytes]) -> None:
        if length == 0:  # every descriptor of the producer's end is gone, without a closing frame
            raise PeerDied(self.name, self._peer_pid or self._peer.words()[0])
        kind = self._check_header(length)
        if kind == CLOSE:
            if self._assembly is not None:
                raise self._corrupt("the producer closed in the middle of a message")
            raise ChannelClosed(f"channel {self.name}: the producer closed")
        payload = self._view[_HEADER.size : length]
        if kind == WHOLE:
            message = bytes(payload)
        else:
            complete = self._take_fragment(kind, payload)
            if complete is None:
                return
            message = complete
        self._messages += 1
        self._bytes += len(message)
        messages.append(message)

    def _corrupt(self, what: str) -> CorruptFrame:
        return CorruptFrame(f"channel {self.name}: {what}")

    def _check_header(self, length: int) -> int:
        if length < _HEADER.size or length > self._max_frame:
            raise self._corrupt("a frame is longer or shorter than a frame may be")
        payload, kind, flags, sequence = _HEADER.unpack_from(self._buffer)
        if payload != length - _HEADER.size:
            raise self._corrupt("a frame has another length than it says")
        if sequence != self._sequence & 0xFFFF:
            raise self._corrupt("a frame has the wrong sequence number")
        if kind > CLOSE or flags:
            raise self._corrupt("a frame is of an unknown kind")
        self._sequence += 1
        inside = kind in (MIDDLE, LAST)
        if kind != CLOSE and inside != (self._assembly is not None):
            raise self._corrupt("a fragment without a beginning" if inside else "a fragmented message was not finished")
        return int(kind)

    def _take_fragment(self, kind: int, payload: memoryview) -> bytes | None:
        if kind == FIRST:
            if payload.nbytes < _TOTAL.size:
                raise self._corrupt("a first fragment is too short")
            self._assembly_size = _TOTAL.unpack_from(payload)[0]
            payload = payload[_TOTAL.size :]
            if self._assembly_size > MAX_MESSAGE:
                raise self._corrupt("a fragmented message has an impossible length")
            self._assembly = bytearray()
        assert self._assembly is not None
        self._assembly += payload
        if len(self._assembly) > self._assembly_size or (kind == LAST) != (len(self._assembly) == self._assembly_size):
            raise self._corrupt("a fragmented message has another length than announced")
        if kind != LAST:
            return None
        message, self._assembly = bytes(self._assembly), None
        return message

    def _give_space(self) -> None:
        """Ring the producer if it found the socket full."""
        try:
            os.eventfd_read(self._want_fd)
        except BlockingIOError:
            return
        self._ring_peer()

    def ready(self) -> bool:
        """For ``arm``: ``drain`` would return or raise something new."""
        if self._want_fd < 0 or self._ended:
            return False
        if self._end is not None or self._peer_pid:
            return True
        try:
            self._socket.recv_into(self._buffer, 1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True
        return True

    def progress(self) -> int:
        """Changes when something was taken."""
        return self._sequence

    def mark_peer_dead(self, pid: int, /) -> None:
        self._check()
        self._peer_pid = pid

    def statistics(self) -> ConsumerStatistics:
        return ConsumerStatistics(self._messages, self._bytes, self._doorbell_writes, 0, 0)

    def close(self) -> None:
        if self._want_fd >= 0 and self._process == os.getpid():
            self._socket.shutdown(socket.SHUT_RDWR)  # the descriptor may have copies; this closes for all of them
            self._give_space()
        self._release()
