"""Counters as an outsider reads them."""

from __future__ import annotations

import mmap
import os

import pytest
from shm_workshop import Workshop

from ringserve.shm import Doorbell, Phase


def test_a_ring_seen_from_outside(ring_workshop: Workshop) -> None:
    link = ring_workshop.link(1 << 16)
    end = link.channel.observer()
    assert end is not None
    ring = ring_workshop.keep(end.attach())
    ring_workshop.keep(end)
    assert ring.name == "source-sink"
    assert (ring.read().messages, ring.read().capacity) == (0, 1 << 16)
    link.sink.arm([link.consumer])
    for length in (100, 50):
        link.producer.put_nowait(bytes(length))
    assert ring.read().messages == 0, "not published yet"
    link.producer.flush()
    reading = ring.read()
    assert (reading.messages, reading.bytes, reading.doorbells, reading.full) == (2, 150, 1, 0)
    assert (reading.used, reading.high_water) == (112 + 64, 0)
    link.consumer.drain()
    assert (ring.read().used, ring.read().high_water) == (0, 112 + 64)
    assert link.consumer.statistics().high_water == 112 + 64
    while link.producer.try_put(bytes(5000)):
        pass
    assert link.source.arm([], [link.producer])
    while link.consumer.drain():
        pass
    reading = ring.read()
    assert (reading.full, reading.space_doorbells) == (1, 1)
    assert reading.high_water > 60_000


def test_observers_cannot_write(ring_workshop: Workshop) -> None:
    link = ring_workshop.link(1 << 16)
    end = link.channel.observer()
    assert end is not None
    with pytest.raises(PermissionError):
        mmap.mmap(end.segment.fileno(), 4096)
    with pytest.raises(OSError):
        os.pwrite(end.segment.fileno(), b"x", 0)
    end.close()


def test_sockets_have_no_common_page(socket_workshop: Workshop) -> None:
    assert socket_workshop.link().channel.observer() is None


def test_a_doorbell_seen_from_outside(workshop: Workshop) -> None:
    """Sleeps, wake-ups, and wake-ups for nothing, on both transports."""
    source, sink = workshop.doorbell("source"), workshop.doorbell("sink")
    channel = workshop.channel("c", source, sink, 1 << 16)
    bell = workshop.keep(Doorbell.attach(sink))
    producer = workshop.keep(channel.producer_end.open())
    consumer = workshop.keep(channel.consumer_end.open())
    end = workshop.keep(sink.observer())
    seen = workshop.keep(end.attach())
    bell.phase = Phase.ready
    bell.beat(77)
    assert bell.arm([consumer])
    first = seen.read()
    assert (first.pid, first.phase, first.heartbeat_ns) == (os.getpid(), Phase.ready, 77)
    assert (first.sleeps, first.refused_sleeps, first.wakes, first.spurious_wakes) == (1, 0, 0, 0)
    producer.put_nowait(b"x")
    producer.flush()
    bell.wait(30)
    assert not bell.arm([consumer]), "it is there"
    assert len(consumer.drain()) == 1
    assert bell.arm([consumer])
    second = seen.read()
    assert (second.sleeps, second.refused_sleeps, second.waits, second.wakes) == (2, 1, 1, 1)
    assert second.spurious_wakes == 0
    sink.ring()
    bell.wait(30)
    assert bell.arm([consumer])
    third = seen.read()
    assert (third.sleeps, third.wakes, third.spurious_wakes) == (3, 2, 1)
    assert bell.statistics().spurious_wakes == 1


def test_space_is_no_spurious_wake(workshop: Workshop) -> None:
    link = workshop.link(1 << 16)
    while link.producer.try_put(bytes(5000)):
        pass
    assert link.source.arm([], [link.producer])
    while link.consumer.drain():
        pass
    link.source.wait(30)
    assert link.producer.try_put(bytes(5000))
    assert link.source.arm([], [link.producer])
    assert (link.source.statistics().wakes, link.source.statistics().spurious_wakes) == (1, 0)
