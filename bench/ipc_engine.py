"""A token's way through the engine without a model: six hops through four processes, there and back.

    frontend -> tokenizer -> scheduler -> executor -> scheduler -> tokenizer -> frontend

With ``engine`` the messages are the engine's own, for a batch of 32 sequences, each decoded by its closed union and
built anew in every process; with ``small`` they are 64 bytes.
"""

from __future__ import annotations

import importlib.util
import signal
import tempfile
import time
from collections import deque
from typing import Any

from ringserve.bench.ipc_handlers import EDGES, NAMES, Content, first_message, handler, last_decoder
from ringserve.bench.ipc_nodes import ChannelNodeSpec, ZmqNodeSpec
from ringserve.process_signals import HELD_SIGNALS
from ringserve.shm import RingObserverEnd, Transport, create_channel, create_doorbell
from ringserve.spawn import ChildProcess

TRANSPORTS = ("ring", "socket", "pyzmq")


def pass_on_forever(spec: Any, content: Content, name: str) -> None:
    """A child's life; ended by a signal."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)
    node = spec.open()
    handle = handler(content, name)
    while True:
        for data in node.receive():
            node.send(*handle(data))


class Path:
    """The frontend's place in this process, and the three others in children."""

    def __init__(self, transport: str, content: Content) -> None:
        self.transport = transport
        self.content = content
        self._directory = tempfile.TemporaryDirectory(prefix="bench-ipc-")
        self._closing: list[Any] = []
        self._observer_ends: list[RingObserverEnd] = []
        specs = self._zmq() if transport == "pyzmq" else self._channels(transport)
        self._children = [
            ChildProcess(f"bench-ipc-{name}", pass_on_forever, specs[name], content, name) for name in NAMES[1:]
        ]
        self._node = specs["frontend"].open()
        self._observers = [end.attach() for end in self._observer_ends]
        self._first = first_message(content)
        self._decode = last_decoder(content)

    def _channels(self, transport: str) -> dict[str, Any]:
        chosen: Transport = "ring" if transport == "ring" else "socket"
        bells = {name: create_doorbell(name, transport=chosen) for name in NAMES}
        channels = {}
        for left, right in EDGES:
            for source, target in ((left, right), (right, left)):
                channel = create_channel(
                    f"{source}>{target}",
                    producer=bells[source],
                    consumer=bells[target],
                    transport=chosen,
                )
                channels[source, target] = channel
                if (end := channel.observer()) is not None:
                    self._observer_ends.append(end)
        self._closing += [*channels.values(), *bells.values()]
        return {
            name: ChannelNodeSpec(
                bells[name],
                tuple(channel.consumer_end for (_, target), channel in channels.items() if target == name),
                tuple((to, channel.producer_end) for (source, to), channel in channels.items() if source == name),
            )
            for name in NAMES
        }

    def _zmq(self) -> dict[str, Any]:
        return {
            name: ZmqNodeSpec(
                self._directory.name,
                name,
                tuple(other for edge in EDGES if name in edge for other in edge if other != name),
            )
            for name in NAMES
        }

    def round_trips(self, count: int, in_flight: int) -> tuple[list[float], float, float]:
        """Microseconds of each round trip, round trips per second, doorbell writes per message (0: unknown)."""
        node, decode, now = self._node, self._decode, time.perf_counter
        before = self._ring_counts()
        sent: deque[float] = deque()
        found: list[float] = []
        number = 0
        start = now()
        while number < min(in_flight, count):
            sent.append(now())
            node.send("tokenizer", self._first(number))
            number += 1
        while len(found) < count:
            for data in node.receive():
                decode(data)
                found.append((now() - sent.popleft()) * 1e6)
                if number < count:
                    sent.append(now())
                    node.send("tokenizer", self._first(number))
                    number += 1
        rate = count / (now() - start)
        messages, doorbells = (after - then for after, then in zip(self._ring_counts(), before, strict=True))
        return found, rate, doorbells / messages if messages else 0.0

    def _ring_counts(self) -> tuple[int, int]:
        readings = [observer.read() for observer in self._observers]
        return sum(r.messages for r in readings), sum(r.doorbells + r.space_doorbells for r in readings)

    def close(self) -> None:
        for child in self._children:
            child.kill()
            child.join()
            child.close()
        for thing in (*self._observers, *self._observer_ends, self._node, *self._closing):
            thing.close()
        self._directory.cleanup()


def available() -> list[str]:
    """What can be measured here."""
    return [name for name in TRANSPORTS if name != "pyzmq" or importlib.util.find_spec("zmq")]
