"""Our own transports as a link: a ring, or its fallback over sockets, in both directions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringserve.bench.ipc_ends import Link
from ringserve.shm import (
    Consumer,
    ConsumerEnd,
    Doorbell,
    DoorbellHandle,
    Producer,
    ProducerEnd,
    Transport,
    create_channel,
    create_doorbell,
)


@dataclass(frozen=True)
class ChannelSpec:
    """A ring, or its fallback, in both directions."""

    bell: DoorbellHandle
    incoming: ConsumerEnd
    outgoing: ProducerEnd
    spin_us: int

    def open(self) -> ChannelEnd:
        return ChannelEnd(self)


class ChannelEnd:
    """As an actor uses its channels: drain, put, flush once, arm, wait."""

    def __init__(self, spec: ChannelSpec) -> None:
        self._bell = Doorbell.attach(spec.bell)
        if spec.spin_us:
            self._bell.allow_spin(spec.spin_us)
        self._consumer = Consumer.attach(spec.incoming)
        self._producer = Producer.attach(spec.outgoing)
        self._consumers, self._producers = [self._consumer], [self._producer]
        self._try_put, self._flush = self._producer.try_put, self._producer.flush
        self._drain, self._arm, self._wait = self._consumer.drain, self._bell.arm, self._bell.wait
        self._max_payload = self._producer.max_payload

    def send(self, messages: Sequence[bytes]) -> None:
        for data in messages:
            if len(data) > self._max_payload:
                self._send_parts(data)
                continue
            while not self._try_put(data):
                self._wait_for_space()
        self._flush()

    def _send_parts(self, data: bytes) -> None:
        offset = 0
        while (offset := self._producer.put_part(data, offset)) < len(data):
            self._wait_for_space()

    def _wait_for_space(self) -> None:
        if self._arm((), self._producers):
            self._wait()

    def receive(self) -> list[bytes]:
        while True:
            if self._arm(self._consumers, ()):
                self._wait()
            if messages := self._drain():
                return messages

    def doorbells(self) -> int:
        return self._producer.statistics().doorbell_writes

    def close(self) -> None:
        for thing in (self._producer, self._consumer, self._bell):
            thing.close()


def channel_link(transport: Transport, spin_us: int = 0) -> Link:
    """``spin_us``: how long an end may look around before it sleeps."""
    near, far = (create_doorbell(name, transport=transport) for name in ("near", "far"))
    forth = create_channel("forth", producer=near, consumer=far, transport=transport)
    back = create_channel("back", producer=far, consumer=near, transport=transport)

    def close_channels() -> None:
        forth.close()
        back.close()

    def close() -> None:
        close_channels()
        near.close()
        far.close()

    return Link(
        ChannelSpec(near, back.consumer_end, forth.producer_end, spin_us),
        ChannelSpec(far, forth.consumer_end, back.producer_end, spin_us),
        close,
    )
