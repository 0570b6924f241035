"""A token's way through the engine without a model: six hops through four processes, there and back.

    frontend -> tokenizer -> scheduler -> executor -> scheduler -> tokenizer -> frontend

With ``engine`` the messages are the engine's own, for a batch of 32 sequences, each decoded by its closed union and
built anew in every process; with ``small`` they are 64 bytes.
"""

from __future__ import annotations

import importlib.util
import itertools
import signal
import tempfile
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from ringserve.messages.columns import pack_i32, pack_u64
from ringserve.messages.prompts import TextPrompt
from ringserve.messages.requests import GenerateRequest, OutputParams, TokenizedRequest
from ringserve.messages.rings import RINGS
from ringserve.messages.sampling import SamplingParams
from ringserve.messages.stats import EngineStats, StepTimes
from ringserve.messages.steps import ModelRunnerOutput, SchedulerOutput
from ringserve.messages.text_outputs import TextOutputs
from ringserve.messages.token_outputs import TokenOutputs
from ringserve.process_signals import HELD_SIGNALS
from ringserve.shm import (
    Consumer,
    ConsumerEnd,
    Doorbell,
    DoorbellHandle,
    Producer,
    ProducerEnd,
    RingObserverEnd,
    Transport,
    WouldBlock,
    create_channel,
    create_doorbell,
)
from ringserve.shm.typed import MESSAGES_PER_FLUSH
from ringserve.spawn import ChildProcess

NAMES = ("frontend", "tokenizer", "scheduler", "executor")
EDGES = tuple(itertools.pairwise(NAMES))
HOPS = 6
BATCH = 32
Content = Literal["engine", "small"]
Handler = Callable[[bytes], tuple[str, bytes]]
"""A message in; the neighbour that gets the next one, and its bytes."""

TRANSPORTS = ("ring", "socket", "pyzmq")


# --------------------------------------------------------------------------------------------- what each process does


class Small(msgspec.Struct, array_like=True, tag=True):
    """64 bytes that know how far they are."""

    hop: int
    number: int
    payload: bytes = bytes(40)


def small_handler(name: str) -> Handler:
    """Pass it on."""
    decode, encode = msgspec.msgpack.Decoder(Small).decode, msgspec.msgpack.Encoder().encode
    route = ("tokenizer", "scheduler", "executor", "scheduler", "tokenizer", "frontend")

    def handle(data: bytes) -> tuple[str, bytes]:
        message = decode(data)
        return route[message.hop], encode(Small(message.hop + 1, message.number, message.payload))

    return handle


def engine_handler(name: str) -> Handler:
    """Decode what this process receives, build what it would send."""
    decode = msgspec.msgpack.Decoder(_inbound(name)).decode
    encode = msgspec.msgpack.Encoder().encode
    slots = pack_i32(range(BATCH))
    ones = pack_i32([1] * BATCH)
    zeros = pack_i32([0] * BATCH)
    stats = EngineStats(BATCH, 0, 900, 1000, 0, 0, 1, BATCH)
    now = time.monotonic_ns

    def handle(data: bytes) -> tuple[str, bytes]:
        message = decode(data)
        match message:
            case GenerateRequest():
                ids = pack_i32(range(BATCH))
                return "scheduler", encode(
                    TokenizedRequest(message.request_id, ids, message.sampling, 1, 16, 0, (), message.sent_ns, now())
                )
            case TokenizedRequest():
                step = message.request_id
                return "executor", encode(SchedulerOutput(step, (), slots, ones, zeros, b"", b"", now()))
            case SchedulerOutput():
                received = now()
                tokens = array("i", message.slots).tobytes()
                return "scheduler", encode(
                    ModelRunnerOutput(message.step_id, message.slots, tokens, None, (), received, received, now())
                )
            case ModelRunnerOutput():
                times = StepTimes(message.step_id, now(), message.received_ns, message.started_ns, message.sent_ns)
                ids = pack_u64([message.step_id] * BATCH)
                return "tokenizer", encode(
                    TokenOutputs(ids, zeros, ones, message.token_ids, (), (), None, (), times, stats, now())
                )
            case TokenOutputs():
                received = now()
                texts = (" token",) * BATCH
                return "frontend", encode(
                    TextOutputs(
                        message.request_ids,
                        message.choices,
                        texts,
                        message.token_counts,
                        message.token_ids,
                        (),
                        (),
                        (),
                        message.times,
                        message.stats,
                        message.sent_ns,
                        received,
                        now(),
                    )
                )
        raise TypeError(message)

    return handle


def _inbound(name: str) -> Any:
    unions = [RINGS[source, target] for source, target in RINGS if target == name]
    union = unions[0]
    for other in unions[1:]:
        union |= other
    return union


def first_message(content: Content) -> Callable[[int], bytes]:
    """What the frontend sends for its ``number``-th request."""
    encode = msgspec.msgpack.Encoder().encode
    if content == "small":
        return lambda number: encode(Small(1, number))
    prompt, sampling, output = (
        TextPrompt("Tell me a story about a ring, a doorbell and a pipe."),
        SamplingParams(7),
        OutputParams(),
    )
    return lambda number: encode(GenerateRequest(number, prompt, sampling, output, sent_ns=time.monotonic_ns()))


def handler(content: Content, name: str) -> Handler:
    return small_handler(name) if content == "small" else engine_handler(name)


def without_transport_us(content: Content, count: int) -> float:
    """Processor time of a round trip's encoding, decoding and building alone: every process's work, in this one."""
    first, handlers = first_message(content), {name: handler(content, name) for name in NAMES[1:]}
    decode = last_decoder(content)
    start = time.thread_time()
    for number in range(count):
        target, data = "tokenizer", first(number)
        while target != "frontend":
            target, data = handlers[target](data)
        decode(data)
    return (time.thread_time() - start) * 1e6 / count


def last_decoder(content: Content) -> Callable[[bytes], Any]:
    """The frontend's."""
    return msgspec.msgpack.Decoder(Small if content == "small" else RINGS["tokenizer", "frontend"]).decode


# ----------------------------------------------------------------------------------------------------- transports


class Node(Protocol):
    """A process's ends towards its neighbours."""

    def send(self, target: str, data: bytes) -> None: ...

    def receive(self) -> list[bytes]:
        """Flush, then block; what is there, at most a bounded batch."""


@dataclass(frozen=True)
class ChannelNodeSpec:
    bell: DoorbellHandle
    inbox: tuple[ConsumerEnd, ...]
    outbox: tuple[tuple[str, ProducerEnd], ...]

    def open(self) -> ChannelNode:
        return ChannelNode(self)


class ChannelNode:
    def __init__(self, spec: ChannelNodeSpec) -> None:
        self._bell = Doorbell.attach(spec.bell)
        self._consumers = tuple(Consumer.attach(end) for end in spec.inbox)
        self._producers = {name: Producer.attach(end) for name, end in spec.outbox}
        self._unpublished = dict.fromkeys(self._producers, 0)

    def send(self, target: str, data: bytes) -> None:
        """As ``Sender.send`` does it."""
        producer = self._producers[target]
        if not producer.try_put(data):
            raise WouldBlock(f"more is in flight to the {target} than its channel holds")
        self._unpublished[target] += 1
        if self._unpublished[target] == MESSAGES_PER_FLUSH:
            self._unpublished[target] = 0
            producer.flush()

    def receive(self) -> list[bytes]:
        for name, producer in self._producers.items():
            self._unpublished[name] = 0
            producer.flush()
        messages: list[bytes] = []
        while not messages:
            if self._bell.arm(self._consumers, ()):
                self._bell.wait()
            for consumer in self._consumers:
                messages += consumer.drain()
        return messages

    def close(self) -> None:
        ends: list[Any] = [*self._consumers, *self._producers.values(), self._bell]
        for end in ends:
            end.close()


@dataclass(frozen=True)
class ZmqNodeSpec:
    """One PULL socket for everything that comes in, one PUSH socket to each neighbour."""

    directory: str
    name: str
    neighbours: tuple[str, ...]

    def open(self) -> ZmqNode:
        return ZmqNode(self)


class ZmqNode:
    def __init__(self, spec: ZmqNodeSpec) -> None:
        import zmq  # an extra

        self._again, self._no_block = zmq.Again, zmq.NOBLOCK
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.bind(f"ipc://{spec.directory}/{spec.name}")
        self._outbox = {name: self._context.socket(zmq.PUSH) for name in spec.neighbours}
        for name, socket in self._outbox.items():
            socket.connect(f"ipc://{spec.directory}/{name}")

    def send(self, target: str, data: bytes) -> None:
        self._outbox[target].send(data)

    def receive(self) -> list[bytes]:
        messages = [self._inbox.recv()]
        try:
            while len(messages) < 64:
                messages.append(self._inbox.recv(self._no_block))
        except self._again:
            return messages
        return messages

    def close(self) -> None:
        for socket in (self._inbox, *self._outbox.values()):
            socket.close(linger=0)
        self._context.term()


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
