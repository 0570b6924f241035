"""Two ends in one process, children by spawn, and a check that nothing is left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Literal

import pytest
from ringserve.shm import (
    ChannelHandle,
    Consumer,
    Doorbell,
    DoorbellHandle,
    Producer,
    create_channel,
    create_doorbell,
)

CHILDREN = Path(__file__).with_name("children.py")


@pytest.fixture(params=["ring", "socket"])
def transport(request: pytest.FixtureRequest) -> Literal["ring", "socket"]:
    chosen: Literal["ring", "socket"] = request.param
    return chosen


def _held() -> Counter[str]:
    """Descriptors and mappings of the kinds that shm makes."""
    gc.collect()
    held: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the listing's own
            continue
        if target.startswith(("/memfd:", "anon_inode:", "socket:", "pipe:")):
            held[target.split("[")[0] if target.startswith(("socket:", "pipe:")) else target] += 1
    held.update("mapping" for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:ringserve" in line)
    return held


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Every test closes what it opens: descriptors, mappings, processes."""
    resource_tracker.ensure_running()
    before = _held()
    yield
    assert not multiprocessing.active_children()
    assert _held() == before


@dataclass
class Link:
    """A channel with both ends in this process; ``source`` is the producer's doorbell, ``sink`` the consumer's."""

    source: Doorbell
    sink: Doorbell
    producer: Producer
    consumer: Consumer
    channel: ChannelHandle


@dataclass
class Workshop:
    """Makes doorbells, channels and children, and closes them."""

    transport: Literal["ring", "socket"]
    closing: list[Any] = field(default_factory=list)
    children: list[SpawnProcess] = field(default_factory=list)

    def keep(self, thing: Any) -> Any:
        self.closing.append(thing)
        return thing

    def doorbell(self, name: str) -> DoorbellHandle:
        handle: DoorbellHandle = self.keep(create_doorbell(name))
        return handle

    def channel(
        self, name: str, producer: DoorbellHandle, consumer: DoorbellHandle, capacity: int = 1 << 20
    ) -> ChannelHandle:
        handle: ChannelHandle = self.keep(
            create_channel(name, producer=producer, consumer=consumer, capacity=capacity, transport=self.transport)
        )
        return handle

    def link(self, capacity: int = 1 << 20) -> Link:
        source, sink = self.doorbell("source"), self.doorbell("sink")
        channel = self.channel("source-sink", source, sink, capacity)
        return Link(
            self.keep(Doorbell.attach(source)),
            self.keep(Doorbell.attach(sink)),
            self.keep(Producer.attach(channel.producer_end)),
            self.keep(Consumer.attach(channel.consumer_end)),
            channel,
        )

    def spawn(self, role: str, *arguments: Any) -> SpawnProcess:
        """Run a function of children.py in a new process."""
        process = multiprocessing.get_context("spawn").Process(
            target=runpy.run_path, args=(str(CHILDREN), {"ROLE": role, "ARGUMENTS": arguments}, "ringserve_child")
        )
        process.start()
        self.children.append(process)
        return process

    def finish(self, process: SpawnProcess, exitcode: int = 0) -> None:
        process.join(60)
        assert process.exitcode == exitcode

    def close(self) -> None:
        for process in self.children:
            if process.is_alive():
                process.kill()
            process.join(30)
            process.close()
        for thing in reversed(self.closing):
            thing.close()


@pytest.fixture
def workshop(transport: Literal["ring", "socket"]) -> Iterator[Workshop]:
    """For tests that hold on both transports."""
    made = Workshop(transport)
    yield made
    made.close()


@pytest.fixture
def ring_workshop() -> Iterator[Workshop]:
    """For tests of what only the ring has."""
    made = Workshop("ring")
    yield made
    made.close()


@pytest.fixture
def socket_workshop() -> Iterator[Workshop]:
    """For tests of what only the socket pair has."""
    made = Workshop("socket")
    yield made
    made.close()


@pytest.fixture
def pump() -> Callable[[Link, int], list[bytes]]:
    """Take ``count`` messages out; every message must be there already."""

    def take(link: Link, count: int) -> list[bytes]:
        messages: list[bytes] = []
        while len(messages) < count:
            assert not link.sink.arm([link.consumer]), f"{len(messages)} of {count} messages came"
            messages += link.consumer.drain()
        return messages

    return take
