"""Producers killed by SIGKILL at random moments; every message that comes out is checked, and the death is timed.

As a command it is the kept benchmark run: ``python -P tests/support/producer_kills.py --kills 1000 --json FILE``.
A process of its own, with one thread: the victims are forks of it (they attach after the fork).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ringserve.shm import (
    Consumer,
    CorruptFrame,
    Doorbell,
    PeerDied,
    Producer,
    create_channel,
    create_doorbell,
    open_pidfd,
)

CAPACITY = 1 << 16
PATIENCE = 60.0


@dataclass
class Outcome:
    """Of one kill."""

    messages: int
    bad: int
    """Messages, or the channel, that were not what the victim sent."""
    raised_ms: float
    """From the kill to PeerDied in a process that slept."""


def message(seed: int, number: int) -> bytes:
    """The victim's message ``number``: a checksum of all the rest first; some are longer than a frame."""
    rng = random.Random(seed * 1_000_003 + number)
    length = rng.choice((0, rng.randrange(200), rng.randrange(4000), rng.randrange(40_000)))
    body = b"%d %d " % (seed, number) + bytes([rng.randrange(256)]) * length
    return zlib.crc32(body).to_bytes(4, "little") + body


def victim(producer: Producer, bell: Doorbell, seed: int) -> None:
    """Send for ever; sleep where there is no room."""
    number = 0
    while True:
        data = message(seed, number)
        number += 1
        if len(data) <= producer.max_payload:
            while not producer.try_put(data):
                if bell.arm([], [producer]):
                    bell.wait(PATIENCE)
        else:
            offset = 0
            while (offset := producer.put_part(data, offset)) < len(data):
                if bell.arm([], [producer]):
                    bell.wait(PATIENCE)
        if number % 3 == 0:
            producer.flush()


def kill_one(seed: int, transport: Literal["ring", "socket"]) -> Outcome:
    """Fork a victim, read along, kill it after a random while, read what is left."""
    mine, theirs = (create_doorbell(name, transport=transport) for name in ("reader", "victim"))
    channel = create_channel("victim>reader", producer=theirs, consumer=mine, capacity=CAPACITY)
    pid = os.fork()
    if pid == 0:
        try:
            producer = Producer.attach(channel.producer_end)
            victim(producer, Doorbell.attach(theirs), seed)
        finally:
            os._exit(1)
    bell, consumer = Doorbell.attach(mine), Consumer.attach(channel.consumer_end)
    pidfd = open_pidfd(pid)
    try:
        return _read_and_kill(bell, consumer, pid, pidfd, seed)
    finally:
        os.waitpid(pid, 0)
        os.close(pidfd)
        for thing in (consumer, bell, channel, mine, theirs):
            thing.close()


def _read_and_kill(bell: Doorbell, consumer: Consumer, pid: int, pidfd: int, seed: int) -> Outcome:
    rng = random.Random(seed)
    kill_after = rng.randrange(1, 200)
    number = bad = 0
    killed_ns = 0

    def take() -> int:
        nonlocal number, bad
        messages = consumer.drain()
        for got in messages:
            bad += got != message(seed, number)
            number += 1
        return len(messages)

    while not killed_ns:
        take()
        if number >= kill_after:
            for _ in range(rng.randrange(2000)):  # up to some tens of microseconds
                pass
            killed_ns = time.monotonic_ns()
            os.kill(pid, signal.SIGKILL)
        elif bell.arm([consumer]) and bell.wait(PATIENCE, [pidfd]):
            raise RuntimeError("the victim died by itself")
    while True:
        if bell.arm([consumer]) and bell.wait(PATIENCE, [pidfd]):
            consumer.mark_peer_dead(pid)
            break
        take()
    try:
        while True:
            take()
    except PeerDied:
        raised_ms = (time.monotonic_ns() - killed_ns) * 1e-6
    except CorruptFrame:
        bad += 1
        raised_ms = float("inf")
    return Outcome(number, bad, raised_ms)


def left_behind() -> set[str]:
    """What lies in the places where others leave things."""
    return {str(path) for place in ("/dev/shm", "/tmp") for path in Path(place).glob("*ringserve*")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--transport", choices=("ring", "socket"), default="ring")
    parser.add_argument("--json", type=Path, help="keep the result here")
    options = parser.parse_args()
    before = left_behind()
    outcomes = [kill_one(seed, options.transport) for seed in range(options.kills)]
    times = sorted(outcome.raised_ms for outcome in outcomes)
    result = {
        "transport": options.transport,
        "kills": len(outcomes),
        "messages_checked": sum(outcome.messages for outcome in outcomes),
        "bad": sum(outcome.bad for outcome in outcomes),
        "left_behind": sorted(left_behind() - before),
        "peer_died_raised_ms": {
            "p50": round(statistics.median(times), 3),
            "p99": round(times[len(times) * 99 // 100], 3),
            "max": round(times[-1], 3),
        },
    }
    print(json.dumps(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if result["bad"] or result["left_behind"] else 0


if __name__ == "__main__":
    sys.exit(main())
