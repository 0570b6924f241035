"""What /metrics tells of rings and doorbells."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from ringserve.frontend.metrics import Metrics
from ringserve.shm import Consumer, Doorbell, Producer, create_channel, create_doorbell


def test_every_ring_and_doorbell_is_shown() -> None:
    a, b = (create_doorbell(name, transport="ring") for name in ("scheduler", "executor"))
    channel = create_channel("scheduler>executor", producer=a, consumer=b, capacity=1 << 16, transport="ring")
    bell, producer = Doorbell.attach(b), Producer.attach(channel.producer_end)
    consumer = Consumer.attach(channel.consumer_end)
    ends = (channel.observer(), a.observer(), b.observer())
    observers = [end.attach() for end in ends if end is not None]
    metrics = Metrics("m", "0")
    metrics.observe(observers)
    assert bell.arm([consumer])
    for _ in range(3):
        producer.put_nowait(bytes(10))
    producer.flush()
    consumer.drain()
    samples = {
        (sample.name, sample.labels.get("ring") or sample.labels.get("process")): sample
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }

    def value(name: str, of: str) -> float:
        found: float = samples[name, of].value
        return found

    ring = "scheduler>executor"
    assert value("ringserve_ring_messages_total", ring) == 3
    assert value("ringserve_ring_bytes_total", ring) == 30
    assert value("ringserve_ring_doorbells_total", ring) == 1
    assert value("ringserve_ring_full_total", ring) == 0
    assert value("ringserve_ring_used_bytes", ring) == 0
    assert value("ringserve_ring_high_water_bytes", ring) == 3 * 24
    assert value("ringserve_ring_capacity_bytes", ring) == 1 << 16
    assert value("ringserve_doorbell_sleeps_total", "executor") == 1
    assert value("ringserve_doorbell_sleeps_total", "scheduler") == 0
    assert samples["ringserve_ring_messages_total", ring].labels["model_name"] == "m"
    for thing in (*observers, *(end for end in ends if end), bell, producer, consumer, channel, a, b):
        thing.close()
