"""Nobody waits for ever: each policy's own bound on who may pass whom, over random loads.

``fair``'s bound is about service, see ``test_policies.py``; here it has to serve everybody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_inputs import executor_ready, make_request
from scheduler_simulation import Engine

from ringserve.config import SchedulerConfig
from ringserve.messages.requests import ServiceTargets

AGING_NS = 1000
DEFAULT_DEADLINE_NS = 5000

Policy = Literal["fcfs", "priority", "deadline", "fair"]


@dataclass
class Arrival:
    """One request of a load, and what became of it."""

    pause_ns: int
    steps: int
    """Steps between the arrival before it and this one."""
    prompt: int
    tokens: int
    priority: int
    due_ns: int
    tenant: str
    arrived_ns: int = 0
    first_step: int = 0
    """Number of steps planned before it came."""
    start: int = -1
    """The step it started in first."""


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        pause_ns=st.sampled_from([0, 10, 300, 2000]),
        steps=st.integers(0, 4),
        prompt=st.integers(1, 60),
        tokens=st.integers(1, 40),
        priority=st.integers(-2, 2),
        due_ns=st.sampled_from([0, 0, 2000, 20000, 10**7]),
        tenant=st.sampled_from(["a", "b", "c"]),
    ),
    min_size=3,
    max_size=25,
)


def play(policy: Policy, arrivals: list[Arrival], num_pages: int, max_num_seqs: int, **config: Any) -> Engine:
    """Run the load to its end, with the books checked after every call, and note who started when."""
    ready = executor_ready(16, num_pages, max_num_seqs, 24)
    engine = Engine(
        ready,
        config=SchedulerConfig(
            scheduling_policy=policy,
            priority_aging=AGING_NS * 1e-9,
            default_deadline=DEFAULT_DEADLINE_NS * 1e-9,
            **config,
        ),
    )
    for number, arrival in enumerate(arrivals):
        engine.now_ns += arrival.pause_ns
        for _ in range(arrival.steps):
            engine.schedule()
            engine.deliver()
        arrival.arrived_ns = engine.now_ns + 1
        arrival.first_step = len(engine.steps)
        arrival.start = -1
        targets = ServiceTargets(arrival.arrived_ns + arrival.due_ns if arrival.due_ns else 0)
        request = make_request(
            number, arrival.prompt, arrival.tokens, priority=arrival.priority, tenant=arrival.tenant, targets=targets
        )
        assert engine.add(request) is None
    engine.run()
    engine.check_empty()
    for index, step in enumerate(engine.steps):
        for new in step.new_sequences:
            arrival = arrivals[new.sampling.seed]
            arrival.start = index if arrival.start < 0 else arrival.start
    return engine


def passes(arrivals: list[Arrival]) -> list[tuple[Arrival, Arrival]]:
    """(who started, who had come before that and started later)."""
    started = [arrival for arrival in arrivals if arrival.start >= 0]
    return [(first, other) for first in started for other in started if other.first_step <= first.start < other.start]


LIMITS = {"num_pages": st.sampled_from([9, 16, 60]), "max_num_seqs": st.sampled_from([1, 2, 6])}
SETTINGS = settings(max_examples=60, deadline=None, derandomize=True, database=None)


@SETTINGS
@given(arrivals=ARRIVALS, **LIMITS)
def test_fcfs_lets_nobody_pass(arrivals: list[Arrival], num_pages: int, max_num_seqs: int) -> None:
    play("fcfs", arrivals, num_pages, max_num_seqs)
    assert all(first.arrived_ns < other.arrived_ns for first, other in passes(arrivals))


@SETTINGS
@given(arrivals=ARRIVALS, **LIMITS)
def test_priority_lets_pass_only_what_comes_soon_enough(
    arrivals: list[Arrival], num_pages: int, max_num_seqs: int
) -> None:
    play("priority", arrivals, num_pages, max_num_seqs)
    for first, other in passes(arrivals):
        assert first.arrived_ns - other.arrived_ns <= (other.priority - first.priority) * AGING_NS + 1


@SETTINGS
@given(arrivals=ARRIVALS, **LIMITS)
def test_deadline_lets_pass_only_what_is_due_earlier(
    arrivals: list[Arrival], num_pages: int, max_num_seqs: int
) -> None:
    engine = play("deadline", arrivals, num_pages, max_num_seqs)

    def due(arrival: Arrival) -> int:
        return arrival.arrived_ns + (arrival.due_ns or DEFAULT_DEADLINE_NS)

    for first, other in passes(arrivals):
        assert due(first) <= due(other)
    for number, arrival in enumerate(arrivals):
        if arrival.start < 0:  # refused, since it was due
            assert number in [refused.request_id for refused in engine.refusals]
            assert arrival.due_ns


@SETTINGS
@given(
    arrivals=ARRIVALS,
    policy=st.sampled_from(["fcfs", "priority", "deadline", "fair"]),
    reservation=st.sampled_from(["prompt", "sequence"]),
    resume_steps=st.sampled_from([0, 8, 64]),
    timeout=st.sampled_from([0.0, 3e-6]),
    **LIMITS,
)
def test_whoever_is_admitted_finishes_or_is_told_why_not(
    arrivals: list[Arrival],
    policy: Policy,
    reservation: str,
    resume_steps: int,
    timeout: float,
    num_pages: int,
    max_num_seqs: int,
) -> None:
    engine = play(
        policy,
        arrivals,
        num_pages,
        max_num_seqs,
        kv_reservation=reservation,
        preemption_resume_steps=resume_steps,
        queue_timeout=timeout,
    )
    refused = {each.request_id: each.code for each in engine.refusals}
    for number, arrival in enumerate(arrivals):
        if number in refused:
            assert refused[number] in ("queue_timeout", "deadline_unreachable")
            assert (number, 0) not in engine.choices
        else:
            assert len(engine.choices[number, 0].tokens) == arrival.tokens
            engine.check_alone(make_request(number, arrival.prompt, arrival.tokens))
    if reservation == "sequence" and policy in ("fcfs", "fair"):
        assert engine.scheduler.num_preemptions == 0


@pytest.mark.parametrize("policy", ["priority", "deadline"])
def test_the_loads_make_somebody_pass(policy: Policy) -> None:
    """Else the tests above would show nothing."""
    arrivals = [Arrival(0, 0, 20, 20, 2 - number, 0 if number < 3 else 2000, "a") for number in range(5)]
    play(policy, arrivals, 60, 1)
    assert any(first.arrived_ns > other.arrived_ns for first, other in passes(arrivals))
