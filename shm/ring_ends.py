"""The ends of a channel over a ring. Everything hot is the C extension's."""

from __future__ import annotations

from ringserve.shm import _ring
from ringserve.shm.roles import Consumer, ConsumerStatistics, Producer, ProducerStatistics


class RingProducer(_ring.RingProducer, Producer):
    """A Producer over shared memory."""

    __slots__ = ()

    def statistics(self) -> ProducerStatistics:
        return ProducerStatistics(*self.counters())


class RingConsumer(_ring.RingConsumer, Consumer):
    """A Consumer over shared memory."""

    __slots__ = ()

    def statistics(self) -> ConsumerStatistics:
        return ConsumerStatistics(*self.counters())
