"""Simulated runs whose times can be told by hand, and invariants of any."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_load import ENGINE, TEN_AND_ONE, outcome, scenario

from ringserve.bench import metrics
from ringserve.bench.load import ClosedLoop, OpenLoop
from ringserve.bench.prompts import Job, Turn
from ringserve.config import SchedulerConfig
from ringserve.simulate.client import Client, SentRequest, Tenant
from ringserve.simulate.engine import simulate
from ringserve.simulate.figures import compute, summarize
from ringserve.simulate.step_time import Engine

MS = 1_000_000
NO_CACHE = SchedulerConfig(enable_prefix_caching=False)


def jobs(*sizes: tuple[int, int]) -> Iterator[Job]:
    """(prompt, output) tokens of each; no two prompts begin alike."""
    return iter([Job((Turn(list(range(i << 12, (i << 12) + prompt)), out),)) for i, (prompt, out) in enumerate(sizes)])


def times(request: SentRequest) -> tuple[int, int, int]:
    """(first token, last token, end) after sending, in ms."""
    stamps = (request.first_token_ns, request.last_token_ns, request.ended_ns)
    first, last, end = (round((stamp - request.sent_ns) / MS) for stamp in stamps)
    return first, last, end


def test_one_request_alone() -> None:
    run = outcome(Client(jobs((100, 5)), ClosedLoop(1), "s"))
    # chunks of 64 and 36 tokens, then a step of one token for each of the other four
    assert times(run.requests[0]) == (10 + 64 + 10 + 36, 120 + 4 * 11, 164)
    assert [round(gap * 1e3) for gap in run.gaps] == [11] * 4
    assert run.requests[0].num_output_tokens == 5
    assert run.stats.num_steps == 6
    assert run.busy_s == pytest.approx(0.164)


def test_two_at_once_share_their_steps() -> None:
    run = outcome(Client(jobs((20, 3), (20, 3)), ClosedLoop(2), "s"))
    assert [times(request) for request in run.requests] == [(50, 74, 74), (50, 74, 74)]


def test_the_way_in_and_out_is_part_of_what_a_client_sees() -> None:
    run = outcome(Client(jobs((20, 1)), ClosedLoop(1), "s", overhead_s=0.005))
    assert times(run.requests[0]) == (35, 35, 35)


def test_a_closed_loop_sends_when_one_has_ended() -> None:
    run = outcome(Client(jobs((20, 1), (20, 1), (20, 1)), ClosedLoop(1), "s"))
    assert [request.sent_ns for request in run.requests[1:]] == [request.ended_ns for request in run.requests[:2]]


def test_a_closed_loop_grows_over_its_ramp() -> None:
    run = outcome(Client(jobs((20, 200), (20, 1)), ClosedLoop(2, ramp=1.0), "s"))
    assert [round(request.sent_ns / MS) for request in run.requests] == [0, 500]


def test_an_open_loop_keeps_its_times_and_its_bound() -> None:
    at = [0.0, 0.001, 0.002, 5.0]
    free = outcome(Client(jobs(*[(20, 4)] * 4), OpenLoop(iter(at)), "s"))
    assert [request.sent_ns / 1e9 for request in free.requests] == at
    bound = outcome(Client(jobs(*[(20, 4)] * 4), OpenLoop(iter(at), max_concurrency=1), "s"))
    ends = [request.ended_ns for request in bound.requests]
    assert [request.sent_ns for request in bound.requests] == [0, ends[0], ends[1], 5_000 * MS]


def test_nothing_starts_after_the_duration() -> None:
    run = outcome(Client(jobs(*[(20, 4)] * 9), OpenLoop(iter([0.0, 1.0, 2.0, 3.0])), "s", duration_s=1.5))
    assert len(run.requests) == 2


def test_a_later_turn_finds_what_was_said_before() -> None:
    conversation = Job((Turn(list(range(40)), 20), Turn([7] * 10, 5)))
    run = outcome(Client(iter([conversation]), ClosedLoop(1), "s", think_time_s=1.0))
    first, second = run.requests
    assert second.sent_ns == first.ended_ns + 1_000 * MS
    assert second.num_prompt_tokens == 40 + 20 + 10
    # Keys and values of the last token drawn are never computed; only full pages are shared.
    assert second.num_cached_tokens == (40 + 19) // ENGINE.page_size * ENGINE.page_size


def test_a_session_keeps_the_page_that_is_not_full() -> None:
    conversation = Job((Turn(list(range(40)), 20), Turn([7] * 10, 5)))
    run = outcome(Client(iter([conversation]), ClosedLoop(1), "s", sessions=True))
    assert run.requests[1].num_cached_tokens == 40 + 19


def test_what_can_never_fit_is_refused_and_counted() -> None:
    run = outcome(Client(jobs((2000, 5), (20, 5)), ClosedLoop(1), "s"))
    assert [request.refused for request in run.requests] == ["context_length_exceeded", ""]
    figures = compute(run, "fcfs", scenario().load.points[0], {"ttft": 1e9})
    assert (figures.requests, figures.completed, figures.refused) == (2, 1, 1)
    assert figures.goodput is not None
    assert figures.goodput.part == 0.5


def test_deadlines_that_cannot_be_met_are_refused() -> None:
    client = Client(jobs(*[(200, 50)] * 40), OpenLoop(iter([0.0] * 40)), "s", {"": Tenant(deadline_ms=3000)})
    run = outcome(client, config=SchedulerConfig(scheduling_policy="deadline"))
    refused = [request for request in run.requests if request.refused]
    assert {request.refused for request in refused} == {"deadline_unreachable"}
    assert 0 < len(refused) < 40


sizes = st.lists(st.tuples(st.integers(1, 200), st.integers(1, 40)), min_size=1, max_size=12)
configs = st.sampled_from(
    [
        SchedulerConfig(),
        SchedulerConfig(scheduling_policy="priority"),
        SchedulerConfig(scheduling_policy="deadline"),
        SchedulerConfig(scheduling_policy="fair"),
    ]
)


@settings(max_examples=60, deadline=None)
@given(sizes, configs, st.booleans(), st.integers(20, 60), st.integers(0, 9))
def test_any_load_is_served_to_the_end(
    load: list[tuple[int, int]], config: SchedulerConfig, is_open: bool, num_pages: int, seed: int
) -> None:
    def client() -> Client:
        rng = random.Random(seed)
        pace = OpenLoop(iter(sorted(rng.uniform(0, 2) for _ in load))) if is_open else ClosedLoop(1 + seed)
        return Client(jobs(*load), pace, str(seed), {"a": Tenant(2.0, 1), "b": Tenant(1.0, -1)})

    engine = Engine(num_pages, 16, 4, 64, 1024)
    run = outcome(client(), engine, config)
    assert len(run.requests) == len(load)
    assert run.stats.num_free_pages == num_pages
    for request in run.requests:
        assert not request.refused
        assert request.sent_ns < request.first_token_ns <= request.last_token_ns == request.ended_ns
        turn = request.conversation.job.turns[0]
        assert (request.num_prompt_tokens, request.num_output_tokens) == (len(turn.prompt), turn.output_tokens)
    assert len(run.gaps) == sum(request.num_output_tokens - 1 for request in run.requests)
    again = outcome(client(), engine, config)
    assert [times(one) for one in again.requests] == [times(one) for one in run.requests]


def test_the_cache_saves_what_prompts_share() -> None:
    shared = ("--prefix-tokens", "64", "--prompt-tokens", "20", "--output-tokens", "2", "--num-requests", "10")
    load = scenario(*shared, "--concurrency", "1")
    figures = load.run("fcfs", load.load.points[0], "s")
    assert figures.cached_tokens == 9 * 64
    off = scenario(*shared, "--concurrency", "1", config=NO_CACHE)
    assert off.run("fcfs", off.load.points[0], "s").cached_tokens == 0


def test_figures_are_those_of_the_benchmark() -> None:
    load = scenario("--rate", "5", "--num-requests", "40", "--output-tokens", "uniform:1:30", "--goodput", "ttft:200")
    figures = load.run("fcfs", load.load.points[0], "s")
    client = Client(load._jobs(load.load.points[0], "s"), load.load.pace(load.load.points[0], "s"), "s")
    run = simulate(load.engine, load.config, TEN_AND_ONE, client)
    ttft = [(request.first_token_ns - request.sent_ns) / MS for request in run.requests]
    e2e = [(request.ended_ns - request.sent_ns) / MS for request in run.requests]
    for ours, theirs in ((figures.ttft_ms, metrics.summarize(ttft)), (figures.e2e_ms, metrics.summarize(e2e))):
        assert ours is not None
        assert theirs is not None
        for name in ("mean", "p50", "p90", "p99", "max"):
            assert getattr(ours, name) == pytest.approx(getattr(theirs, name))
    assert figures.goodput is not None
    assert figures.goodput.part == sum(value <= 200 for value in ttft) / 40
    assert summarize(np.array([])) is None


@pytest.mark.parametrize(
    ("engine", "config"),
    [
        (Engine(256, 16, 8, 64, 16), SchedulerConfig()),  # nothing ever fits
        (ENGINE, SchedulerConfig(max_num_queued_tokens=1)),
        (ENGINE, SchedulerConfig(max_num_queued_per_tenant=1)),
    ],
)
def test_refusals_do_not_stop_the_clock(engine: Engine, config: SchedulerConfig) -> None:
    """Clients that are refused at once and have endless requests: the load ends with its duration."""
    endless = (Job((Turn([0] * 20, 3),)) for _ in itertools.count())
    run = outcome(Client(endless, ClosedLoop(4), "s", duration_s=0.5), engine, config)
    refused = [request for request in run.requests if request.refused]
    assert 0 < len(refused) <= 4 * 50
    assert max(request.sent_ns for request in refused) < 500 * MS
