"""Counters of all rings and doorbells of the server, read from their pages when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ringserve.shm import DoorbellObserver, RingObserver

_RING_COUNTERS = (
    ("messages", "Messages published."),
    ("bytes", "Bytes of the messages published."),
    ("doorbells", "Times the producer had to wake the consumer (system calls)."),
    ("space_doorbells", "Times the consumer woke a producer that waited for space."),
    ("full", "Times the producer found no room."),
)
_RING_GAUGES = (
    ("used", "Bytes waiting in the ring."),
    ("high_water", "Most bytes that the consumer ever found waiting."),
    ("capacity", "Bytes that the ring holds."),
)
_DOORBELL_COUNTERS = (
    ("sleeps", "Times the process found nothing to do and went to sleep."),
    ("refused_sleeps", "Times it was about to sleep and found something."),
    ("wakes", "Times it was rung."),
    ("spurious_wakes", "Times it was rung and found nothing."),
    ("spins", "Times something came while it looked around before sleeping."),
)


class RingMetrics:
    """``ringserve_ring_*`` with the label ``ring`` (producer>consumer), ``ringserve_doorbell_*`` with ``process``."""

    def __init__(
        self, observers: Sequence[RingObserver | DoorbellObserver], labels: Sequence[str], values: Sequence[str]
    ) -> None:
        self._rings = [observer for observer in observers if isinstance(observer, RingObserver)]
        self._doorbells = [observer for observer in observers if isinstance(observer, DoorbellObserver)]
        self._labels = list(labels)
        self._values = list(values)

    def collect(self) -> Iterator[Metric]:
        rings = [(observer.name, observer.read()) for observer in self._rings]
        for name, text in _RING_COUNTERS:
            yield self._counter(f"ringserve_ring_{name}", text, "ring", [(ring, getattr(r, name)) for ring, r in rings])
        for name, text in _RING_GAUGES:
            gauge = GaugeMetricFamily(f"ringserve_ring_{name}_bytes", text, labels=[*self._labels, "ring"])
            for ring, reading in rings:
                gauge.add_metric([*self._values, ring], getattr(reading, name))
            yield gauge
        doorbells = [(observer.name, observer.read()) for observer in self._doorbells]
        for name, text in _DOORBELL_COUNTERS:
            found = [(process, getattr(reading, name)) for process, reading in doorbells]
            yield self._counter(f"ringserve_doorbell_{name}", text, "process", found)

    def _counter(self, name: str, text: str, label: str, values: list[tuple[str, int]]) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=[*self._labels, label])
        for value_of, value in values:
            family.add_metric([*self._values, value_of], value)
        return family
