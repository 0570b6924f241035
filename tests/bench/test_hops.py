"""Hops from the text of /metrics, and their means between two readings."""

from __future__ import annotations

import pytest

from ringserve.bench.hops import hop_sums, mean_microseconds


def test_hops_are_read_from_the_exposition() -> None:
    text = (
        "# TYPE ringserve_hop_seconds histogram\n"
        'ringserve_hop_seconds_bucket{hop="executor",le="+Inf"} 4.0\n'
        'ringserve_hop_seconds_count{hop="executor"} 4.0\n'
        'ringserve_hop_seconds_sum{hop="executor"} 0.5\n'
        "# TYPE other_seconds gauge\n"
        "other_seconds 3.0\n"
    )
    assert hop_sums(text) == {"executor": (0.5, 4.0)}


def test_means_are_those_of_what_came_between() -> None:
    before = {"executor": (0.5, 4.0), "idle": (1.0, 2.0)}
    after = {"executor": (0.8, 10.0), "idle": (1.0, 2.0), "new": (0.002, 4.0)}
    assert mean_microseconds(before, after) == pytest.approx({"executor": 50_000, "new": 500})
