"""What the two ends of a measured link say to each other, and how the answering end answers. msgspec on both sides, as
in the engine: encoding and decoding are part of what is measured."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable

import msgspec


class Probe(msgspec.Struct, array_like=True, tag=True):
    """A measured message."""

    sent_ns: int
    """``time.monotonic_ns()``: one machine, one clock."""
    reply: bool
    payload: bytes = b""


class Stamp(msgspec.Struct, array_like=True, tag=True):
    """Answer to a Probe."""

    received_ns: int


class Pin(msgspec.Struct, array_like=True, tag=True):
    """Run on these processors, with all threads. Answered by a Stamp."""

    cpus: list[int]


class Report(msgspec.Struct, array_like=True, tag=True):
    """Asked for with zeros; answered with what the process has used so far."""

    cpu_ns: int = 0
    doorbells: int = 0


class Stop(msgspec.Struct, array_like=True, tag=True):
    """End."""


MESSAGE = Probe | Stamp | Pin | Report | Stop
_OVERHEAD = 24
"""Bytes of an encoded Probe beyond its payload, about."""

encode = msgspec.msgpack.Encoder().encode
decode: Callable[[bytes], Probe | Stamp | Pin | Report | Stop] = msgspec.msgpack.Decoder(MESSAGE).decode


def payload(size: int) -> bytes:
    """Makes a Probe about ``size`` bytes long."""
    return bytes(max(0, size - _OVERHEAD))


def pin_all_threads(cpus: Iterable[int]) -> None:
    """Libraries have threads of their own."""
    chosen = set(cpus)
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended by now
            os.sched_setaffinity(int(thread), chosen)


class Answerer:
    """The far end, whatever carries the messages."""

    def __init__(self, doorbells: Callable[[], int]) -> None:
        self._doorbells = doorbells
        self.stopped = False

    def answer(self, data: bytes) -> bytes | None:
        """What to send back."""
        message = decode(data)
        if isinstance(message, Probe):
            return encode(Stamp(time.monotonic_ns())) if message.reply else None
        match message:
            case Pin(cpus):
                pin_all_threads(cpus)
                return encode(Stamp(time.monotonic_ns()))
            case Report():
                return encode(Report(time.process_time_ns(), self._doorbells()))
            case _:
                self.stopped = True
                return None
