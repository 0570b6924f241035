"""A producer or consumer that writes what it must not: refused, never followed outside the mapping."""

from __future__ import annotations

import mmap
import os
import random
import socket
import struct
from collections.abc import Iterator

import pytest
from shm_workshop import Link, Workshop

from ringserve.shm import ChannelClosed, CorruptFrame, _ring
from ringserve.shm.channel import RingCarrier, SocketCarrier

CAPACITY = 1 << 16
OFFSETS = {name: offset for name, (offset, _, _) in _ring.LAYOUT.items()}
WHOLE, FIRST, MIDDLE, LAST = range(4)


class Memory:
    """The ring's bytes as a hostile process sees them."""

    def __init__(self, link: Link) -> None:
        carrier = link.channel.producer_end.carrier
        assert isinstance(carrier, RingCarrier)
        self.map = mmap.mmap(carrier.segment.fileno(), 4096 + CAPACITY)
        self.tail = 0
        self.sequence = 0

    def frame(self, kind: int, payload: bytes, length: int | None = None, flags: int = 0, skip: int = 0) -> None:
        """Write a frame, and the tail behind it; ``length`` and ``skip`` (of the sequence number) are for lies."""
        header = struct.pack(
            "=IBBH", len(payload) if length is None else length, kind, flags, (self.sequence + skip) & 0xFFFF
        )
        for index, byte in enumerate(header + payload):
            self.map[4096 + (self.tail + index) % CAPACITY] = byte
        self.tail += (8 + len(payload) + 7) & ~7
        self.sequence += 1
        self.set_tail(self.tail)

    def set_tail(self, tail: int) -> None:
        struct.pack_into("=Q", self.map, OFFSETS["RING_TAIL"], tail % (1 << 64))

    def set_head(self, head: int) -> None:
        struct.pack_into("=Q", self.map, OFFSETS["RING_HEAD"], head % (1 << 64))


@pytest.fixture
def hostile(ring_workshop: Workshop) -> Iterator[tuple[Link, Memory]]:
    link = ring_workshop.link(CAPACITY)
    memory = Memory(link)
    yield link, memory
    memory.map.close()


def assert_lost(link: Link) -> None:
    for _ in range(2):
        assert_once(link)
    assert link.sink.arm([link.consumer]), "a channel that was reported lost keeps nobody awake"


def assert_once(link: Link) -> None:
    with pytest.raises(CorruptFrame, match="source-sink"):
        link.consumer.drain()


def test_honest_frames_by_hand_are_taken(hostile: tuple[Link, Memory]) -> None:
    link, memory = hostile
    memory.frame(WHOLE, b"one")
    memory.frame(FIRST, struct.pack("=Q", 6) + b"ab")
    memory.frame(MIDDLE, b"cd")
    memory.frame(LAST, b"ef")
    assert link.consumer.drain() == [b"one", b"abcdef"]


@pytest.mark.parametrize("tail", [1, 4, CAPACITY + 8, -8, 1 << 63, (1 << 64) - 8])
def test_impossible_positions_of_the_producer(hostile: tuple[Link, Memory], tail: int) -> None:
    link, memory = hostile
    memory.set_tail(tail)
    assert not link.sink.arm([link.consumer])
    assert_lost(link)


def test_a_position_that_goes_back(hostile: tuple[Link, Memory]) -> None:
    link, memory = hostile
    memory.frame(WHOLE, b"12345678")
    assert len(link.consumer.drain()) == 1
    memory.set_tail(8)
    assert_lost(link)


@pytest.mark.parametrize("length", [9, 16, CAPACITY // 8 - 7, CAPACITY, 1 << 31, (1 << 32) - 1])
def test_lengths_over_the_tail_or_the_bound(hostile: tuple[Link, Memory], length: int) -> None:
    link, memory = hostile
    memory.frame(WHOLE, b"12345678", length=length)
    assert_lost(link)


def test_length_over_a_frames_bound_inside_the_tail(hostile: tuple[Link, Memory]) -> None:
    link, memory = hostile
    memory.frame(WHOLE, bytes(CAPACITY // 8))
    assert_lost(link)


@pytest.mark.parametrize(
    ("kind", "flags", "skip"), [(4, 0, 0), (255, 0, 0), (WHOLE, 1, 0), (WHOLE, 0, 1), (WHOLE, 0, -1)]
)
def test_unknown_kinds_flags_and_sequence_numbers(
    hostile: tuple[Link, Memory], kind: int, flags: int, skip: int
) -> None:
    link, memory = hostile
    memory.frame(WHOLE, b"good")
    memory.frame(kind, b"bad", flags=flags, skip=skip)
    assert link.consumer.drain() == [b"good"], "what came before the fault is delivered"
    assert not link.sink.arm([link.consumer])
    assert_lost(link)


@pytest.mark.parametrize(
    "frames",
    [
        [(MIDDLE, b"x")],
        [(LAST, b"x")],
        [(FIRST, b"short")],
        [(FIRST, struct.pack("=Q", 64 * 1024 * 1024 + 1))],
        [(FIRST, struct.pack("=Q", (1 << 64) - 1))],
        [(FIRST, struct.pack("=Q", 2) + b"ab")],
        [(FIRST, struct.pack("=Q", 0))],
        [(FIRST, struct.pack("=Q", 9) + b"ab"), (WHOLE, b"x")],
        [(FIRST, struct.pack("=Q", 9) + b"ab"), (FIRST, struct.pack("=Q", 9) + b"ab")],
        [(FIRST, struct.pack("=Q", 9) + b"ab"), (LAST, b"x")],
        [(FIRST, struct.pack("=Q", 9) + b"ab"), (LAST, b"12345678")],
        [(FIRST, struct.pack("=Q", 9) + b"ab"), (MIDDLE, b"1234567")],
    ],
)
def test_fragments_out_of_order_or_length(hostile: tuple[Link, Memory], frames: list[tuple[int, bytes]]) -> None:
    link, memory = hostile
    for kind, payload in frames:
        memory.frame(kind, payload)
    assert_lost(link)


def test_close_in_the_middle_of_a_message(hostile: tuple[Link, Memory]) -> None:
    link, memory = hostile
    memory.frame(FIRST, struct.pack("=Q", 9) + b"ab")
    struct.pack_into("=I", memory.map, OFFSETS["RING_PROD_STATE"], 2)
    assert link.consumer.drain() == []
    assert_lost(link)


@pytest.mark.parametrize("head", [4, -8, CAPACITY, 1 << 63])
def test_impossible_positions_of_the_consumer(hostile: tuple[Link, Memory], head: int) -> None:
    """The producer looks at the consumer's position when it runs out of room."""
    link, memory = hostile
    memory.set_head(head)
    for _ in range(CAPACITY // 16):
        assert link.producer.try_put(b"12345678")
    with pytest.raises(CorruptFrame):
        link.producer.try_put(b"12345678")


def test_a_real_producers_frames_truncated_at_every_length(ring_workshop: Workshop) -> None:
    """Cut the tail of one frame of each kind short: never a message out of it."""
    for cut in range(8, 64, 8):
        link = ring_workshop.link(CAPACITY)
        memory = Memory(link)
        link.producer.put_nowait(bytes(56))
        link.producer.flush()
        memory.set_tail(64 - cut)
        if cut == 64:
            assert link.consumer.drain() == []
        else:
            assert_lost(link)
        memory.map.close()


@pytest.mark.parametrize("seed", range(40))
def test_random_bytes_never_get_through(ring_workshop: Workshop, seed: int) -> None:
    """Random memory, random honest frames with random damage, tails anywhere: an answer each time, no crash. Whatever
    is returned has at most the bytes the ring can hold."""
    rng = random.Random(seed)
    for _ in range(5):
        link = ring_workshop.link(CAPACITY)
        memory = Memory(link)
        if rng.random() < 0.5:
            memory.map[4096:] = rng.randbytes(CAPACITY)
        for _ in range(rng.randrange(40)):
            memory.frame(rng.choice((WHOLE, WHOLE, FIRST, MIDDLE, LAST)), rng.randbytes(rng.randrange(300)))
        for _ in range(rng.randrange(4)):
            memory.map[4096 + rng.randrange(max(8, min(memory.tail, CAPACITY)))] = rng.randrange(256)
        if rng.random() < 0.5:
            memory.set_tail(rng.randrange(0, CAPACITY + 1, 8))
        for _ in range(100):
            try:
                messages = link.consumer.drain()
            except CorruptFrame:
                break
            assert sum(map(len, messages)) <= CAPACITY
            if not messages:
                break
        memory.map.close()


def test_header_changed_while_it_is_read(hostile: tuple[Link, Memory]) -> None:
    """Messages stay inside the frame's bound when another process keeps scribbling over headers and payload."""
    link, memory = hostile
    child = os.fork()
    if child == 0:
        rng = random.Random(1)
        for _ in range(150_000):
            memory.map[4096 + rng.randrange(64)] = rng.randrange(256)
        os._exit(0)
    done = False
    while not done:
        done = os.waitpid(child, os.WNOHANG)[0] == child
        try:
            messages = link.consumer.drain()
            assert all(len(message) <= CAPACITY // 8 for message in messages)
        except CorruptFrame:
            continue
        memory.set_tail((memory.tail + 64) % CAPACITY)


@pytest.mark.parametrize(
    ("stream", "delivered"),
    [
        (bytes(9000), [b""]),
        (struct.pack("=IBBH", CAPACITY // 8 - 7, 0, 0, 0), []),
        (struct.pack("=IBBH", (1 << 32) - 1, 0, 0, 0), []),
        (struct.pack("=IBBH", 4, 0, 0, 1) + b"four", []),
        (struct.pack("=IBBH", 4, 5, 0, 0) + b"four", []),
        (struct.pack("=IBBH", 4, 0, 1, 0) + b"four", []),
        (struct.pack("=IBBH", 4, 2, 0, 0) + b"four", []),
        (struct.pack("=IBBH", 4, 1, 0, 0) + b"four", []),
        (struct.pack("=IBBHQ", 8, 1, 0, 0, 1 << 40), []),
        (struct.pack("=IBBHQ", 8, 1, 0, 0, 0), []),
        (struct.pack("=IBBHQ", 8, 1, 0, 0, 9) + struct.pack("=IBBH", 0, 4, 0, 1), []),
        (struct.pack("=IBBHQ", 8, 1, 0, 0, 9) + struct.pack("=IBBHH", 2, 3, 0, 1, 0), []),
        (struct.pack("=IBBHQ", 8, 1, 0, 0, 9) + struct.pack("=IBBHH", 2, 0, 0, 1, 0), []),
        (struct.pack("=IBBH", 2, 0, 0, 0) + b"ok" + struct.pack("=IBBH", 4, 0, 0, 2) + b"four", [b"ok"]),
    ],
)
def test_hostile_streams_are_refused(socket_workshop: Workshop, stream: bytes, delivered: list[bytes]) -> None:
    link = socket_workshop.link(CAPACITY)
    with raw_end(link) as raw:
        raw.send(stream)
    if delivered:
        assert link.consumer.drain() == delivered, "what came before the fault is delivered"
        assert not link.sink.arm([link.consumer])
    assert_lost(link)
    wakes = link.sink.statistics().wakes
    link.sink.wait(0)
    assert link.sink.statistics().wakes == wakes


@pytest.mark.parametrize("seed", range(20))
def test_random_streams_never_get_through(socket_workshop: Workshop, seed: int) -> None:
    """Honest frames with random damage, in random pieces: an answer each time, never more bytes than were sent."""
    rng = random.Random(seed)
    for _ in range(5):
        link = socket_workshop.link(CAPACITY)
        stream = bytearray()
        for number in range(rng.randrange(1, 60)):
            payload = rng.randbytes(rng.randrange(300))
            kind = rng.choice((WHOLE, WHOLE, WHOLE, FIRST, MIDDLE, LAST, 4))
            stream += struct.pack("=IBBH", len(payload), kind, 0, number) + payload
        for _ in range(rng.randrange(3)):
            stream[rng.randrange(len(stream))] = rng.randrange(256)
        taken, at = 0, 0
        with raw_end(link) as raw:
            while at < len(stream):
                at += raw.send(stream[at : at + rng.randrange(1, 700)])
                try:
                    taken += sum(map(len, link.consumer.drain()))
                except (CorruptFrame, ChannelClosed):
                    break
        assert taken <= len(stream)


def raw_end(link: Link) -> socket.socket:
    """The producer's end as bytes."""
    carrier = link.channel.producer_end.carrier
    assert isinstance(carrier, SocketCarrier)
    return socket.socket(fileno=os.dup(carrier.end.fileno()))
