"""The prefix cache on the real model: less is computed, the output is the same."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec
import pytest
from engine_core import EngineCore, LoadedExecutor, default_model, greedy


@pytest.fixture(scope="module")
def executor() -> Iterator[LoadedExecutor]:
    loaded = LoadedExecutor(default_model(), "float32", threads=1, max_model_len=2048)
    yield loaded
    loaded.actor.shutdown()


def test_a_second_request_with_the_same_prefix(executor: LoadedExecutor) -> None:
    rng = random.Random(5)
    prefix = [rng.randrange(100, 20000) for _ in range(1000)]
    first, second = (prefix + [rng.randrange(100, 20000) for _ in range(24)] for _ in range(2))
    alone = EngineCore(executor).run([greedy(0, second, 16)])[0, 0].token_ids

    core = EngineCore(executor)
    core.run([greedy(1, first, 16)])
    computed = sum(times.num_tokens for times in core.times)
    assert computed == 1024 + 15
    assert core.run([greedy(2, second, 16)])[2, 0].token_ids == alone
    shared = 1000 // executor.ready.page_size * executor.ready.page_size
    assert sum(times.num_tokens for times in core.times) - computed == 1024 - shared + 15
    assert core.stats is not None
    assert (core.stats.num_prefix_queries, core.stats.num_prefix_hits) == (2 * 1024, shared)
    assert core.stats.num_free_pages == core.stats.num_pages


def test_choices_that_share_their_prompt(executor: LoadedExecutor) -> None:
    rng = random.Random(6)
    prompt = [rng.randrange(100, 20000) for _ in range(150)]
    requests = [msgspec.structs.replace(greedy(n, prompt, 12, temperature=0.9, seed=7), n=3) for n in (1, 2)]
    core = EngineCore(executor)
    core.run(requests)
    page_size = executor.ready.page_size
    rest = 150 - 149 // page_size * page_size
    assert sum(times.num_tokens for times in core.times) == 150 + 5 * rest + 6 * 11
    apart = [EngineCore(executor).run([request]) for request in requests]
    for request, results in zip(requests, apart, strict=True):
        for choice in range(3):
            key = request.request_id, choice
            assert core.results[key].token_ids == results[key].token_ids
    assert len({tuple(core.results[1, choice].token_ids) for choice in range(3)}) == 3
