"""Greedy output in float32 equals ``transformers``' ``generate``, however the work is cut into steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from engine_core import EngineCore, LoadedExecutor, default_model, greedy
from reference import NEW_TOKENS, Reference, assert_equal_but_for_ties

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def executor() -> Iterator[LoadedExecutor]:
    loaded = LoadedExecutor(default_model(), "float32", threads=1, max_model_len=2048)
    yield loaded
    loaded.actor.shutdown()


@pytest.fixture(scope="module")
def small_pages() -> Iterator[LoadedExecutor]:
    loaded = LoadedExecutor(default_model(), "float32", block_size=8, max_model_len=2048, swap_space=256 << 20)
    assert loaded.ready.num_host_pages >= 256
    yield loaded
    loaded.actor.shutdown()


def outputs(core: EngineCore, references: list[Reference]) -> list[list[int]]:
    core.run(greedy(index, reference.prompt, NEW_TOKENS) for index, reference in enumerate(references))
    assert all(core.results[index, 0].reason == "length" for index in range(len(references)))
    return [core.results[index, 0].token_ids for index in range(len(references))]


def test_one_after_the_other(executor: LoadedExecutor, references: list[Reference]) -> None:
    core = EngineCore(executor)
    got = []
    for index, reference in enumerate(references):
        core.run([greedy(index, reference.prompt, NEW_TOKENS)])
        got.append(core.results[index, 0].token_ids)
    assert_equal_but_for_ties(references, got)


def test_all_at_once(executor: LoadedExecutor, references: list[Reference]) -> None:
    core = EngineCore(executor)
    assert_equal_but_for_ties(references, outputs(core, references))
    assert core.stats is not None
    assert core.stats.num_preemptions == 0
    assert core.stats.num_free_pages == core.stats.num_pages


def test_with_a_budget_of_32_tokens_per_step(executor: LoadedExecutor, references: list[Reference]) -> None:
    core = EngineCore(executor, max_num_batched_tokens=32)
    assert_equal_but_for_ties(references, outputs(core, references))
    assert max(times.num_tokens for times in core.times) <= 32


@pytest.mark.parametrize("num_host_pages", [0, 256])
def test_with_so_few_pages_that_sequences_are_preempted(
    small_pages: LoadedExecutor, references: list[Reference], num_host_pages: int
) -> None:
    """Small pages, so that every sequence grows by several: more than what admission keeps free. With pages on the host
    what was preempted comes back, without them it is computed again."""
    longest = max(len(reference.prompt) for reference in references) + NEW_TOKENS
    core = EngineCore(
        small_pages,
        num_pages=-(-longest // 8) + 2,
        max_model_len=longest,
        num_host_pages=num_host_pages,
        swap_bytes_per_second=1e15,
    )
    assert_equal_but_for_ties(references, outputs(core, references))
    assert core.stats is not None
    assert core.stats.num_preemptions > 0
    assert (core.stats.swapped_in_tokens > 0) == (num_host_pages > 0)
    assert (core.stats.preempted_tokens > 0) == (num_host_pages == 0)
    assert core.stats.num_free_pages == core.stats.num_pages
    assert core.stats.num_swapped_pages == 0


def test_two_steps_are_in_flight(executor: LoadedExecutor, references: list[Reference]) -> None:
    """Step k+1 was planned before step k's result was sent."""
    core = EngineCore(executor)
    core.run(greedy(index, references[4].prompt, 64) for index in range(8))
    decodes = [times for times in core.times if times.num_tokens == times.num_sequences == 8]
    assert len(decodes) > 50
    ahead = sum(later.scheduled_ns < earlier.executor_finished_ns for earlier, later in itertools.pairwise(decodes))
    assert ahead >= 0.9 * (len(decodes) - 1)


def test_a_seeded_request_does_not_depend_on_its_neighbours(executor: LoadedExecutor) -> None:
    """Sampled tokens in float32, alone and among thirty others (bfloat16: through HTTP)."""
    sampled = {"temperature": 0.9, "top_p": 0.95, "seed": 99}
    request = greedy(0, list(range(500, 540)), 32, **sampled)
    alone = EngineCore(executor).run([request])[0, 0].token_ids
    others = [greedy(1 + n, list(range(600 + n, 620 + 3 * n)), 8 + n, temperature=0.8, seed=n) for n in range(30)]
    among = EngineCore(executor).run([*others[:15], request, *others[15:]])[0, 0].token_ids
    assert among == alone
