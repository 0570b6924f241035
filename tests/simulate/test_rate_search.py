"""The search on a made-up server, and on simulated ones."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from simulated_load import scenario

import ringserve.bench
from ringserve.bench.load_options import Point
from ringserve.bench.metrics import Goodput
from ringserve.simulate.figures import Figures
from ringserve.simulate.rate_search import FARTHEST, PRECISION, highest_rate

SAMPLES = Path(ringserve.bench.__file__).parent / "samples"


def made_up(limit: float, rate: float) -> Figures:
    load = scenario("--num-requests", "1", "--goodput", "ttft:1000")
    figures = load.run("fcfs", Point(concurrency=1), "s")
    return msgspec.structs.replace(figures, goodput=Goodput({}, rate, 1.0 if rate <= limit else 0.5))


@pytest.mark.parametrize("limit", [0.013, 0.9, 1.0, 37.0])
def test_it_closes_in_on_the_limit(limit: float) -> None:
    found = highest_rate("fcfs", 0.9, 1.0, lambda rate: made_up(limit, rate))
    assert found.requests_per_s is not None
    assert limit / PRECISION <= found.requests_per_s <= limit
    assert not found.unbounded


def test_no_limit_and_no_rate() -> None:
    high = highest_rate("fcfs", 0.9, 1.0, lambda rate: made_up(1e30, rate))
    assert (high.unbounded, high.requests_per_s, len(high.probes)) == (True, 2.0**FARTHEST, FARTHEST + 1)
    low = highest_rate("fcfs", 0.9, 1.0, lambda rate: made_up(0.0, rate))
    assert (low.unbounded, low.requests_per_s) == (False, None)


def test_the_rate_of_a_simulated_server() -> None:
    """One token a request, in steps of 11 ms for one: the server's own limit is in between."""
    words = ("--prompt-tokens", "54", "--output-tokens", "1", "--num-requests", "300", "--goodput", "ttft:500")
    load = scenario(*words)
    found = load.highest_rate("fcfs", 0.99)
    assert found.requests_per_s is not None
    assert 10 < found.requests_per_s < 1 / 0.064
    at = load.run("fcfs", Point(rate=found.requests_per_s), f"{load.load.seed} rate")
    assert at.goodput is not None
    assert at.goodput.part >= 0.99


@pytest.mark.parametrize(("form", "name"), [("mooncake", "mooncake.jsonl"), ("azure", "azure.csv")])
def test_a_trace_is_replayed_at_its_times_and_faster(form: str, name: str) -> None:
    words = ("--dataset", form, "--dataset-path", str(SAMPLES / name), "--max-prompt-tokens", "900")
    load = scenario(*words, "--max-output-tokens", "50", "--goodput", "ttft:2000")
    arrivals = load.load.dataset.arrivals()  # type: ignore[union-attr]
    figures = load.run("fcfs", Point(), "s")
    assert figures.completed == len(arrivals)
    assert figures.duration_s >= arrivals[-1].at
    assert figures.prompt_tokens == sum(min(arrival.prompt_tokens, 900) for arrival in arrivals)
    if form == "mooncake":
        assert figures.cached_tokens > 0  # equal hash ids are equal tokens
    found = load.highest_rate("fcfs", 0.5)
    assert found.requests_per_s is not None
    assert len(found.probes) > 2
