"""Races around falling asleep: no wake-up is lost. Bounded by a generous timeout, never by speed."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pytest
from ringserve.shm import Consumer, Doorbell, Producer, _ring

if TYPE_CHECKING:
    from conftest import Workshop

LOST = "a wake-up was lost"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
@pytest.mark.parametrize("seed", [1, 2])
def test_no_wake_up_is_lost_at_the_sleep_handshake(ring_workshop: Workshop, seed: int) -> None:
    """60,000 messages for each seed, each sent while the consumer is about to sleep.

    The consumer acknowledges, waits a few hundred nanoseconds at random, arms and blocks. This side spins on the
    acknowledgement and sends the next message a random moment later, so that publishing races with arming. One
    lost wake-up stops the consumer for good: it reports that by its exit code.
    """
    count = 60_000
    mine, theirs = ring_workshop.doorbell("parent"), ring_workshop.doorbell("child")
    forth = ring_workshop.channel("forth", mine, theirs, 1 << 16)
    back = ring_workshop.channel("back", theirs, mine, 1 << 16)
    child = ring_workshop.spawn("sleeper", theirs, forth.consumer_end, back.producer_end, count, seed)
    producer = ring_workshop.keep(Producer.attach(forth.producer_end))
    consumer = ring_workshop.keep(Consumer.attach(back.consumer_end))
    rng = random.Random(seed + 1000)
    put, flush, drain = producer.put_nowait, producer.flush, consumer.drain
    for _ in range(count):
        for _ in range(rng.getrandbits(6)):
            pass
        put(b"")
        flush()
        turns = 0
        while not drain():
            turns += 1
            if turns % 4096 == 0:
                assert child.is_alive(), LOST
    ring_workshop.finish(child)
    assert producer.statistics().doorbell_writes > count // 100, "the consumer hardly ever slept: no race"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_no_wake_up_is_lost_at_the_space_handshake(ring_workshop: Workshop) -> None:
    """The producer finds the ring full 15,000 times and sleeps; space comes at the moment it falls asleep."""
    cycles = 15_000
    mine, theirs = ring_workshop.doorbell("parent"), ring_workshop.doorbell("child")
    channel = ring_workshop.channel("c", theirs, mine, 1 << 16)
    child = ring_workshop.spawn("filler", theirs, channel.producer_end, cycles, 5)
    bell = ring_workshop.keep(Doorbell.attach(mine))
    consumer = ring_workshop.keep(Consumer.attach(channel.consumer_end))
    assert isinstance(consumer, _ring.RingConsumer)
    rng = random.Random(9)
    cycle = turns = 0
    used = consumer.counters
    while cycle < cycles:
        turns += 1
        if turns % 4096 == 0:
            assert child.is_alive(), LOST
        if used()[3] < 8 << 13:  # wait for it to be full
            if not child.is_alive():
                break
            continue
        for _ in range(rng.getrandbits(8)):
            pass
        while consumer.drain(64, 1 << 20):
            pass
        cycle += 1
    ring_workshop.finish(child)
    bell.disarm()
