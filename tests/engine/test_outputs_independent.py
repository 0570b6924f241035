"""What a request yields depends on nothing but the request: not on policy, batch, budget, pages, preemption or cache.

A small random model in float32 whose logits lie far apart; each request's plain run is alone, with room for everything
and without a prefix cache.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from checkpoints import SERVED, VOCAB_SIZE, make_checkpoint
from engine_core import EngineCore, LoadedExecutor, greedy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringserve.config import ModelSource, SchedulerConfig
from ringserve.messages.requests import TokenizedRequest

PAGE_SIZE = 8


@dataclass
class Bench:
    """The model, and what each request yields alone."""

    executor: LoadedExecutor
    plain: dict[tuple[Any, ...], list[list[int]]] = field(default_factory=dict)

    def alone(self, shape: tuple[Any, ...]) -> list[list[int]]:
        if shape not in self.plain:
            core = EngineCore(self.executor, SchedulerConfig(enable_prefix_caching=False))
            request = request_of(0, shape)
            core.run([request])
            self.plain[shape] = [core.results[0, choice].token_ids for choice in range(request.n)]
        return self.plain[shape]


def request_of(request_id: int, shape: tuple[Any, ...]) -> TokenizedRequest:
    """A shape is (prompt, of a family of prompts that begin alike; length; tokens; n; temperature). What is drawn at
    random is drawn with penalties."""
    family, length, max_tokens, n, temperature = shape
    rng = random.Random(family)
    prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
    penalties = {"repetition_penalty": 1.1, "frequency_penalty": 0.4, "presence_penalty": 0.2} if temperature else {}
    request = greedy(request_id, prompt, max_tokens, temperature=temperature, seed=11, **penalties)
    return msgspec.structs.replace(request, n=n)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, *SERVED["llama"])
    executor = LoadedExecutor(
        ModelSource(str(path), "directory", "tiny"),
        "float32",
        block_size=PAGE_SIZE,
        max_num_batched_tokens=256,
        swap_space=1 << 20,
    )
    assert executor.ready.num_host_pages >= 40
    yield Bench(executor)
    executor.actor.shutdown()


SHAPES = st.tuples(
    st.sampled_from([1, 1, 2]),
    st.sampled_from([3, 17, 40, 41, 64]),
    st.sampled_from([1, 8, 30]),
    st.sampled_from([1, 1, 2]),
    st.sampled_from([0.0, 0.8]),
)


@settings(max_examples=30, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(
    shapes=st.lists(SHAPES, min_size=2, max_size=7),
    arrivals=st.lists(st.integers(0, 6), min_size=7, max_size=7),
    policy=st.sampled_from(["fcfs", "priority", "deadline", "fair"]),
    caching=st.booleans(),
    reservation=st.sampled_from(["prompt", "prompt", "sequence"]),
    budget=st.sampled_from([5, 32, 256]),
    num_pages=st.sampled_from([13, 16, 40]),
    max_num_seqs=st.sampled_from([2, 8]),
    resume_steps=st.sampled_from([0, 16]),
    target_itl_ms=st.sampled_from([0.0, 0.01]),
    num_host_pages=st.sampled_from([40, 40, 5, 0]),
)
def test_outputs_are_those_of_a_plain_run(
    bench: Bench,
    shapes: list[tuple[Any, ...]],
    arrivals: list[int],
    policy: Any,
    caching: bool,
    reservation: Any,
    budget: int,
    num_pages: int,
    max_num_seqs: int,
    resume_steps: int,
    target_itl_ms: float,
    num_host_pages: int,
) -> None:
    config = SchedulerConfig(
        scheduling_policy=policy,
        enable_prefix_caching=caching,
        kv_reservation=reservation,
        preemption_resume_steps=resume_steps,
        target_itl_ms=target_itl_ms,
    )
    core = EngineCore(
        bench.executor,
        config,
        max_num_batched_tokens=budget,
        num_pages=num_pages,
        max_num_seqs=max_num_seqs,
        num_host_pages=num_host_pages,
        swap_bytes_per_second=1e15,
    )
    for request_id, (shape, turns) in enumerate(zip(shapes, arrivals, strict=False)):
        core.add(
            msgspec.structs.replace(
                request_of(request_id, shape), priority=request_id % 3, tenant=f"tenant {request_id % 2}"
            )
        )
        for _ in range(turns):
            core.turn()
    core.run()
    for request_id, shape in enumerate(shapes):
        for choice, expected in enumerate(bench.alone(shape)):
            assert core.results[request_id, choice].token_ids == expected
    assert core.stats is not None
    assert core.stats.num_free_pages == num_pages
    assert core.stats.num_swapped_pages == 0


def test_the_loads_of_these_tests_preempt_and_hit(bench: Bench) -> None:
    """Else the test above would show less than it says."""
    core = EngineCore(bench.executor, SchedulerConfig(), num_pages=13, max_num_seqs=8, num_host_pages=0)
    core.run(request_of(number, (1, 17, 30, 1, 0.0)) for number in range(4))
    assert core.stats is not None
    assert core.stats.num_preemptions > 0
    assert core.stats.num_prefix_hits > 0


@pytest.mark.parametrize("caching", [False, True])
def test_penalties_and_seeds_go_on_behind_what_comes_back_from_the_host(bench: Bench, caching: bool) -> None:
    """Nothing is computed twice, and everything is as it is alone."""
    shapes = [(family, 17, 60, 1, temperature) for family in range(4) for temperature in (0.0, 0.8)]
    core = EngineCore(
        bench.executor,
        SchedulerConfig(enable_prefix_caching=caching),
        num_pages=24,
        max_num_seqs=8,
        num_host_pages=bench.executor.ready.num_host_pages,
        swap_bytes_per_second=1e15,
    )
    pool = bench.executor.swap_pool
    assert pool is not None
    before = pool.statistics()
    core.run(request_of(number, shape) for number, shape in enumerate(shapes))
    after = pool.statistics()
    for number, shape in enumerate(shapes):
        assert [core.results[number, 0].token_ids] == bench.alone(shape)
    stats = core.stats
    assert stats is not None
    assert stats.num_preemptions > 3
    assert stats.preempted_tokens == 0
    assert stats.swapped_in_tokens > 3 * 17
    assert after.pages_out - before.pages_out == stats.swapped_out_pages
    assert after.pages_in - before.pages_in == stats.swapped_in_pages > 0
