"""Processes that really block and wake each other, many times. Bounded by a generous timeout, never by speed.

Whether the fences are needed cannot be seen here, where Python runs between the instructions that matter: that is
test_wakeup_race.py.
"""

from __future__ import annotations

import contextlib
import random

import pytest
from shm_workshop import Workshop

from ringserve.shm import ChannelClosed, Consumer, Doorbell, Producer

LOST = "a wake-up was lost"


def await_messages(bell: Doorbell, consumer: Consumer) -> list[bytes]:
    """Spin first, so as to be awake when the other side falls asleep; then sleep, or two cores would be needed."""
    for _ in range(100):
        if messages := consumer.drain(64, 1 << 20):
            return messages
    while True:
        if bell.arm([consumer]):
            wakes = bell.statistics().wakes
            bell.wait(90)
            assert bell.statistics().wakes > wakes, LOST
        if messages := consumer.drain(64, 1 << 20):
            return messages


@pytest.mark.parametrize("seed", [1, 2])
def test_no_wake_up_is_lost_at_the_sleep_handshake(ring_workshop: Workshop, seed: int) -> None:
    """At least 10,000 arms for each seed, each racing with a message that is being published.

    The consumer takes one message, acknowledges, waits a few hundred nanoseconds at random, arms, and waits to be
    rung. This side sends in bursts, a random moment between messages, and waits for all acknowledgements after each
    burst (half of the bursts are one message): nothing that follows could repair a lost wake-up of the burst's last
    message. The consumer reports one by its exit code.
    """
    count = 10_000
    mine, theirs = ring_workshop.doorbell("parent"), ring_workshop.doorbell("child")
    forth = ring_workshop.channel("forth", mine, theirs, 1 << 16)
    back = ring_workshop.channel("back", theirs, mine, 1 << 16)
    child = ring_workshop.spawn("sleeper", theirs, forth.consumer_end, back.producer_end, count, seed)
    bell = ring_workshop.keep(Doorbell.attach(mine))
    producer = ring_workshop.keep(Producer.attach(forth.producer_end))
    consumer = ring_workshop.keep(Consumer.attach(back.consumer_end))
    rng = random.Random(seed + 1000)
    sent = acknowledged = 0
    last: list[bytes] = []
    while sent < count:
        for _ in range(min(count - sent, rng.choice((1, rng.randrange(2, 17))))):
            for _ in range(rng.getrandbits(6)):
                pass
            producer.put_nowait(b"")
            producer.flush()
            sent += 1
        while acknowledged < sent:
            last = await_messages(bell, consumer)
            acknowledged += len(last)
    while last[-1] == b"":
        last = await_messages(bell, consumer)
    ring_workshop.finish(child)
    assert int(last[-1]) >= count
    assert producer.statistics().doorbell_writes > count // 100, "the consumer hardly ever slept: no race"


def test_no_wake_up_is_lost_at_the_space_handshake(ring_workshop: Workshop) -> None:
    """The producer finds the ring full 2,000 times and sleeps; space comes at the moment it falls asleep."""
    cycles = 2_000
    mine, theirs = ring_workshop.doorbell("parent"), ring_workshop.doorbell("child")
    channel = ring_workshop.channel("c", theirs, mine, 1 << 16)
    child = ring_workshop.spawn("filler", theirs, channel.producer_end, cycles, 5)
    bell = ring_workshop.keep(Doorbell.attach(mine))
    consumer = ring_workshop.keep(Consumer.attach(channel.consumer_end))
    rng = random.Random(9)
    got = 0
    with contextlib.suppress(ChannelClosed):
        while True:
            got += len(await_messages(bell, consumer))
            for _ in range(rng.getrandbits(7)):
                pass
    assert got >= cycles
    assert consumer.statistics().doorbell_writes > cycles // 100, "the producer hardly ever slept: no race"
    ring_workshop.finish(child)
