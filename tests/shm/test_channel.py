"""What a channel promises, on both transports."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable

import pytest
from shm_workshop import Link, Workshop

from ringserve.shm import (
    ChannelClosed,
    Consumer,
    Doorbell,
    ForkedUse,
    MessageTooLarge,
    PeerDied,
    Producer,
    ShmError,
    WouldBlock,
    create_channel,
    create_doorbell,
)

Pump = Callable[[Link, int], list[bytes]]


def put_whole(link: Link, data: bytes) -> list[bytes]:
    """Put a message of any length, draining meanwhile."""
    if len(data) <= link.producer.max_payload:
        link.producer.put_nowait(data)
        link.producer.flush()
        return []
    offset, drained = 0, []
    while offset < len(data):
        offset = link.producer.put_part(data, offset)
        link.producer.flush()
        drained += link.consumer.drain()
    return drained


def test_messages_come_in_order_and_whole(workshop: Workshop, pump: Pump) -> None:
    link = workshop.link()
    sent = [b"%d" % number for number in range(200)]
    for message in sent:
        link.producer.put_nowait(message)
    link.producer.flush()
    assert pump(link, 200) == sent


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_can_be_put(workshop: Workshop, pump: Pump, kind: type) -> None:
    link = workshop.link()
    link.producer.put_nowait(kind(b"abc"))
    link.producer.flush()
    assert pump(link, 1) == [b"abc"]


@pytest.mark.parametrize("capacity", [1 << 16, 1 << 20])
def test_every_length_survives_fragmentation_and_wrap_around(workshop: Workshop, capacity: int) -> None:
    link = workshop.link(capacity)
    payload = link.producer.max_payload
    edges = [payload - 8, payload - 1, payload, payload + 1, 2 * payload - 8, 2 * payload - 7, 3 * payload]
    rng = random.Random(7)
    lengths = [0, 1, 7, 8, 9, *edges, 1 << 20, *(rng.randrange(1 << 18) for _ in range(60)), 1 << 20]
    sent = [rng.randbytes(length) for length in lengths]
    received: list[bytes] = []
    for message in sent:
        received += put_whole(link, message)
        received += link.consumer.drain()
    while not link.sink.arm([link.consumer]):
        received += link.consumer.drain()
    assert received == sent


def test_lengths_beyond_the_bounds_are_refused(workshop: Workshop, pump: Pump) -> None:
    link = workshop.link()
    with pytest.raises(MessageTooLarge):
        link.producer.put_nowait(bytes(link.producer.max_payload + 1))
    with pytest.raises(MessageTooLarge):
        link.producer.put_part(bytes(64 * 1024 * 1024 + 1), 0)
    link.producer.put_nowait(b"still usable")
    link.producer.flush()
    assert pump(link, 1) == [b"still usable"]


def test_parts_must_follow_one_another(workshop: Workshop) -> None:
    link = workshop.link(1 << 16)
    data = bytes(1 << 20)
    with pytest.raises(ValueError):
        link.producer.put_part(b"fits one frame", 0)
    with pytest.raises(ValueError):
        link.producer.put_part(data, 5)
    offset = link.producer.put_part(data, 0)
    assert 0 < offset < len(data)
    with pytest.raises(ValueError):
        link.producer.put_part(data, offset + 1)
    with pytest.raises(ValueError):
        link.producer.put_part(data[:-1], offset)
    with pytest.raises(ShmError):
        link.producer.put_nowait(b"in between")


def test_drain_is_bounded(workshop: Workshop) -> None:
    link = workshop.link()
    for _ in range(100):
        link.producer.put_nowait(bytes(500))
    link.producer.flush()
    assert len(link.consumer.drain()) == 64
    assert len(link.consumer.drain(max_messages=3)) == 3
    assert len(link.consumer.drain(max_bytes=1)) == 1
    assert len(link.consumer.drain(1000, 5000)) == 10
    assert not link.sink.arm([link.consumer])


def test_full_is_would_block_and_nothing_is_lost(workshop: Workshop, pump: Pump) -> None:
    link = workshop.link(1 << 16)
    sent = 0
    while link.producer.try_put(b"%06d" % sent * 100):
        sent += 1
    with pytest.raises(WouldBlock):
        link.producer.put_nowait(b"%06d" % sent * 100)
    assert sent > 10
    assert pump(link, sent) == [b"%06d" % number * 100 for number in range(sent)]
    link.producer.put_nowait(b"room again")
    link.producer.flush()
    assert pump(link, 1) == [b"room again"]


def test_producer_is_rung_when_there_is_room(workshop: Workshop) -> None:
    link = workshop.link(1 << 16)
    while link.producer.try_put(bytes(1000)):
        pass
    assert link.source.arm([], [link.producer])
    assert link.source.wait(0) == ()
    assert link.source.statistics().wakes == 0
    assert link.source.arm([], [link.producer])
    while link.consumer.drain():
        pass
    link.source.wait(30)
    assert link.source.statistics().wakes == 1
    assert link.producer.try_put(bytes(1000))
    assert link.source.arm([], [link.producer]), "a producer that found room waits for none"


def test_cycle_with_both_directions_full_goes_on(workshop: Workshop) -> None:
    """Two processes that flood each other before reading: neither waits for space without draining, both finish."""
    a, b = workshop.doorbell("a"), workshop.doorbell("b")
    forth = workshop.channel("forth", a, b, 1 << 16)
    back = workshop.channel("back", b, a, 1 << 16)
    bells = [workshop.keep(Doorbell.attach(a)), workshop.keep(Doorbell.attach(b))]
    producers = [workshop.keep(Producer.attach(end)) for end in (forth.producer_end, back.producer_end)]
    consumers = [workshop.keep(Consumer.attach(end)) for end in (back.consumer_end, forth.consumer_end)]
    sent, got, fulls = [0, 0], [0, 0], 0
    while min(got) < 3000:
        asleep = 0
        for side in (0, 1):
            while sent[side] < 3000 and producers[side].try_put(b"%0500d" % sent[side]):
                sent[side] += 1
            producers[side].flush()
            fulls += sent[side] < 3000
        for side in (0, 1):
            for message in consumers[side].drain():
                assert message == b"%0500d" % got[side]
                got[side] += 1
        for side in (0, 1):
            wakes = bells[side].statistics().wakes
            bells[side].clear()
            rung = bells[side].statistics().wakes > wakes
            asleep += bells[side].arm([consumers[side]], [producers[side]]) and not rung
        assert asleep < 2 or min(got) == 3000, "both sleep and nobody will ring"
    assert fulls > 10


def test_close_is_seen_after_the_last_message(workshop: Workshop) -> None:
    link = workshop.link()
    assert link.sink.arm([link.consumer])
    link.producer.put_nowait(b"last")
    link.producer.close()
    link.sink.wait(30)
    assert link.sink.statistics().wakes == 1
    assert link.consumer.drain() == [b"last"]
    assert not link.sink.arm([link.consumer]), "the close has not been reported"
    for _ in range(2):
        with pytest.raises(ChannelClosed):
            link.consumer.drain()
    assert link.sink.arm([link.consumer]), "a close that was reported keeps nobody awake"
    with pytest.raises(ChannelClosed):
        link.producer.put_nowait(b"after close")
    link.producer.close()


def test_close_is_seen_even_when_full(workshop: Workshop) -> None:
    link = workshop.link(1 << 16)
    sent = 0
    while link.producer.try_put(bytes(3000)):
        sent += 1
    link.producer.close()
    got = 0
    while got < sent:
        got += len(link.consumer.drain())
    assert got == sent
    with pytest.raises(ChannelClosed):
        link.consumer.drain()


def test_producer_learns_that_the_consumer_closed(workshop: Workshop) -> None:
    link = workshop.link(1 << 16)
    while link.producer.try_put(bytes(3000)):
        pass
    assert link.source.arm([], [link.producer])
    link.consumer.close()
    link.source.wait(30)
    assert link.source.statistics().wakes == 1
    with pytest.raises(ChannelClosed):
        link.producer.put_nowait(b"nobody reads")
    with pytest.raises(ChannelClosed):
        link.consumer.drain()
    link.producer.flush()


def test_peer_death_is_raised_after_the_last_message(workshop: Workshop) -> None:
    link = workshop.link()
    link.producer.put_nowait(b"last")
    link.producer.flush()
    link.consumer.mark_peer_dead(4711)
    assert link.consumer.drain() == [b"last"]
    assert not link.sink.arm([link.consumer])
    with pytest.raises(PeerDied) as caught:
        link.consumer.drain()
    assert (caught.value.pid, caught.value.name) == (4711, "source-sink")
    assert link.sink.arm([link.consumer])
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.pid, again.name, str(again)) == (4711, "source-sink", str(caught.value))


def test_statistics(workshop: Workshop, pump: Pump) -> None:
    link = workshop.link(1 << 16)
    assert link.sink.arm([link.consumer])
    for _ in range(5):
        link.producer.put_nowait(bytes(100))
    link.producer.flush()
    link.producer.flush()
    put = link.producer.statistics()
    assert (put.messages, put.bytes, put.full, put.doorbell_writes) == (5, 500, 0, 1)
    pump(link, 5)
    while link.producer.try_put(bytes(1000)):
        pass
    assert link.producer.statistics().full == 1
    taken = link.consumer.statistics()
    assert (taken.messages, taken.bytes, taken.used > 0) == (5, 500, workshop.transport == "ring")


def test_use_after_fork_is_refused(workshop: Workshop) -> None:
    """Ends and doorbells belong to the process that attached them; closing there harms nobody."""
    link = workshop.link()
    link.producer.put_nowait(b"before")
    child = os.fork()
    if child == 0:
        refused = 0
        for use in (
            lambda: link.producer.put_nowait(b"x"),
            link.producer.flush,
            link.consumer.drain,
            link.sink.clear,
            lambda: link.sink.arm([]),
            lambda: link.sink.wait(0),
            link.sink.ring,
        ):
            try:
                use()
            except ForkedUse:
                refused += 1
        link.producer.close()
        link.consumer.close()
        link.sink.close()
        os._exit(0 if refused == 7 else 1)
    assert os.waitpid(child, 0)[1] == 0
    link.producer.put_nowait(b"after")
    link.producer.flush()
    assert link.consumer.drain() == [b"before", b"after"]


def test_handles_are_pickled_for_spawned_children_only(workshop: Workshop) -> None:
    link = workshop.link()
    with pytest.raises(ShmError):
        pickle.dumps(link.channel.producer_end)
    with pytest.raises(ShmError):
        pickle.dumps(workshop.doorbell("x"))


@pytest.mark.parametrize("capacity", [0, 65535, 3 << 16, 1 << 31])
def test_impossible_capacities_are_refused(capacity: int) -> None:
    a, b = create_doorbell("a"), create_doorbell("b")
    with pytest.raises(ValueError):
        create_channel("ab", producer=a, consumer=b, capacity=capacity)
    a.close()
    b.close()
