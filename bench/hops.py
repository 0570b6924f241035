"""What a message's hops from process to process have taken, from the text of a server's /metrics."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families


def hop_sums(exposition: str) -> dict[str, tuple[float, float]]:
    """(seconds, count) by hop, so far."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(exposition):
        if family.name == "ringserve_hop_seconds":
            for sample in family.samples:
                found.setdefault(sample.labels["hop"], {})[sample.name.rpartition("_")[2]] = sample.value
    return {hop: (parts["sum"], parts["count"]) for hop, parts in found.items()}


def mean_microseconds(
    before: Mapping[str, tuple[float, float]], after: Mapping[str, tuple[float, float]]
) -> dict[str, float]:
    """Of each hop between two readings; hops that nothing has taken since are missing."""
    means = {}
    for hop, (seconds, count) in after.items():
        old_seconds, old_count = before.get(hop, (0.0, 0.0))
        if count > old_count:
            means[hop] = (seconds - old_seconds) / (count - old_count) * 1e6
    return means
