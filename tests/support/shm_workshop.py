"""Doorbells, channels and spawned children for the tests of shm: made, kept, and closed."""

from __future__ import annotations

import multiprocessing
import runpy
from dataclasses import dataclass, field
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Literal

from ringserve.shm import ChannelHandle, Consumer, Doorbell, DoorbellHandle, Producer, create_channel, create_doorbell

CHILDREN = Path(__file__).parents[1] / "shm" / "children.py"


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
        handle: DoorbellHandle = self.keep(create_doorbell(name, transport=self.transport))
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
