"""What spawned children of the tests do. Run by ``runpy`` with ROLE and ARGUMENTS set: the tests are no package that a
child could import."""

from __future__ import annotations

import os
import random
import time
from typing import Any

from ringserve.shm import (
    ChannelClosed,
    Consumer,
    ConsumerEnd,
    Doorbell,
    DoorbellHandle,
    Phase,
    Producer,
    ProducerEnd,
)

PATIENCE = 60.0


def spin(rng: random.Random, bits: int) -> None:
    """A tiny random delay: up to 2**bits turns of about 20 ns."""
    for _ in range(rng.getrandbits(bits)):
        pass


def echo(handle: DoorbellHandle, incoming: ConsumerEnd, outgoing: ProducerEnd) -> None:
    """Send everything back until the other side closes."""
    bell, consumer, producer = Doorbell.attach(handle), Consumer.attach(incoming), Producer.attach(outgoing)
    inheritable = [target for fd in map(int, os.listdir("/proc/self/fd")) if (target := _inheritable(fd))]
    bell.phase = Phase.ready
    bell.beat(time.monotonic_ns())
    pending: list[bytes] = []
    producer.put_nowait(repr(inheritable).encode())
    while True:
        try:
            pending += consumer.drain()
        except ChannelClosed:
            break
        while pending and producer.try_put(pending[0]):
            pending.pop(0)
        producer.flush()
        if bell.arm([consumer], [producer]):
            bell.wait(PATIENCE)
    assert not pending
    for thing in (producer, consumer, bell):
        thing.close()


def _inheritable(fd: int) -> str:
    """What a descriptor of the kinds that shm makes is, if it would survive exec."""
    try:
        target = os.readlink(f"/proc/self/fd/{fd}")
        ours = target.startswith(("/memfd:", "anon_inode:", "socket:"))
        return target if ours and os.get_inheritable(fd) else ""
    except OSError:  # the directory's own descriptor
        return ""


def send_some_and_hang(handle: DoorbellHandle, outgoing: ProducerEnd, count: int) -> None:
    """Publish ``count`` messages, put one more without publishing it, and wait to be killed."""
    bell, producer = Doorbell.attach(handle), Producer.attach(outgoing)
    for number in range(count):
        producer.put_nowait(b"%d" % number)
    producer.flush()
    bell.wait(PATIENCE)


def produce(handle: DoorbellHandle, outgoing: ProducerEnd, name: bytes, count: int) -> None:
    """Send ``count`` numbered messages, sleeping when there is no room, then close."""
    bell, producer = Doorbell.attach(handle), Producer.attach(outgoing)
    for number in range(count):
        while not producer.try_put(b"%s %d" % (name, number)):
            if bell.arm([], [producer]):
                bell.wait(PATIENCE)
        producer.flush()
    producer.close()
    bell.close()


def sleeper(handle: DoorbellHandle, incoming: ConsumerEnd, outgoing: ProducerEnd, count: int, seed: int) -> None:
    """The sleep handshake's consumer: drain, acknowledge, go to sleep at once or a moment later.

    Every acknowledgement is where the other side begins to race with the next arm. A wait that runs into its timeout
    though a message is there and nobody rang is a lost wake-up: exit code 3. The last message says how many arms it
    took.
    """
    rng = random.Random(seed)
    bell, consumer, producer = Doorbell.attach(handle), Consumer.attach(incoming), Producer.attach(outgoing)
    taken = arms = 0
    while taken < count:
        got = consumer.drain(1)
        if got:
            taken += len(got)
            producer.put_nowait(b"")
            producer.flush()
        spin(rng, 6)
        arms += 1
        if bell.arm([consumer]) and taken < count:
            _sleep(rng, bell, [consumer], [])
    producer.put_nowait(b"%d" % arms)
    for thing in (producer, consumer, bell):
        thing.close()


def _sleep(rng: random.Random, bell: Doorbell, consumers: list[Consumer], producers: list[Producer]) -> None:
    """Wait to be rung, after arming: mostly by looking at the eventfd for a while, which keeps both sides running and
    racing; else, and once in sixteen times at once, by blocking."""
    wakes = bell.statistics().wakes
    for _ in range(200 if rng.getrandbits(4) else 0):
        bell.clear()
        if bell.statistics().wakes > wakes:
            return
    for _ in range(2):
        bell.wait(20.0)
        if bell.statistics().wakes > wakes:
            return
    if not bell.arm(consumers, producers):  # twice 20 s without a ring, and yet there is something
        os._exit(3)


def filler(handle: DoorbellHandle, outgoing: ProducerEnd, cycles: int, seed: int) -> None:
    """The space handshake's producer: fill the ring, race to sleep. Lost wake-up: exit code 3."""
    rng = random.Random(seed)
    bell, producer = Doorbell.attach(handle), Producer.attach(outgoing)
    data = bytes(producer.max_payload)
    full = 0
    while full < cycles:
        if producer.try_put(data):
            continue
        full += 1
        spin(rng, 6)
        if bell.arm([], [producer]):
            _sleep(rng, bell, [], [producer])
    producer.close()
    bell.close()


if __name__ == "ringserve_child":
    _given: dict[str, Any] = globals()
    _given[_given["ROLE"]](*_given["ARGUMENTS"])
