"""A raw stream socket pair as a link, its messages framed by their lengths."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from ringserve.bench.ipc_ends import Link
from ringserve.shm.descriptors import Descriptor

_LENGTH = struct.Struct("=I")


class Unframer:
    """Messages with a length before each, out of a stream of bytes."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """The messages that are complete now."""
        buffer = self._buffer
        buffer += data
        messages, position = [], 0
        while len(buffer) - position >= 4:
            end = position + 4 + _LENGTH.unpack_from(buffer, position)[0]
            if end > len(buffer):
                break
            messages.append(bytes(memoryview(buffer)[position + 4 : end]))
            position = end
        if position:
            del buffer[:position]
        return messages


def framed(messages: Sequence[bytes]) -> bytes:
    """A length before each."""
    return b"".join(piece for data in messages for piece in (_LENGTH.pack(len(data)), data))


@dataclass(frozen=True)
class UnixSpec:
    """One end of a stream socket pair."""

    descriptor: Descriptor

    def open(self) -> UnixEnd:
        return UnixEnd(self.socket())

    def socket(self) -> socket.socket:
        return socket.socket(fileno=os.dup(self.descriptor.fileno()))


class UnixEnd:
    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._unframer = Unframer()
        self._chunk = bytearray(1 << 18)

    def send(self, messages: Sequence[bytes]) -> None:
        self._socket.sendall(framed(messages))

    def receive(self) -> list[bytes]:
        while True:
            got = self._socket.recv_into(self._chunk)
            if not got:
                raise EOFError("the other end is gone")
            if messages := self._unframer.feed(memoryview(self._chunk)[:got]):
                return messages

    def doorbells(self) -> int:
        return 0

    def close(self) -> None:
        self._socket.close()


def unix_link() -> Link:
    """A stream socket pair; also for event loops."""
    near, far = (Descriptor(end.detach()) for end in socket.socketpair())

    def close() -> None:
        near.close()
        far.close()

    return Link(UnixSpec(near), UnixSpec(far), close)
