"""The receiving end of a channel over a stream socket pair."""

from __future__ import annotations

import select
import socket
from typing import Literal, NoReturn

from ringserve.shm.bell_page import BellPage
from ringserve.shm.errors import ChannelClosed, CorruptFrame, PeerDied, ShmError
from ringserve.shm.forks import FORKS
from ringserve.shm.roles import MAX_MESSAGE, Consumer, ConsumerStatistics
from ringserve.shm.socket_end import CLOSE, FIRST, HEADER, KIND_AND_FLAGS, LAST, MIDDLE, NEXT, TOTAL, WORD, SocketEnd

_unpack = HEADER.unpack_from
_DONT_WAIT = int(socket.MSG_DONTWAIT)
_READ = 64 * 1024
"""Bytes asked for at once."""


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
                    self._word = found + NEXT & WORD
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
                word = word + NEXT & WORD
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
        kind = found & KIND_AND_FLAGS
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
            if len(payload) < TOTAL.size:
                return self._corrupt("a first fragment is too short")
            self._assembly, self._assembly_left = [], TOTAL.unpack_from(payload)[0]
            if self._assembly_left > MAX_MESSAGE:
                return self._corrupt("a fragmented message has an impossible length")
            payload = payload[TOTAL.size :]
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
