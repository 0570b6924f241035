"""More sequences than pages: who is thrown out, when it comes back, and what it cost."""

from __future__ import annotations

from collections import defaultdict

import pytest
from scheduler_inputs import executor_ready, make_request
from scheduler_simulation import Engine

from ringserve.config import SchedulerConfig
from ringserve.messages.columns import unpack_i32


def engine_of(ready: dict[str, int], **config: object) -> Engine:
    return Engine(executor_ready(**ready), config=SchedulerConfig(**config))  # type: ignore[arg-type]


def steps_between_resumption_and_preemption(engine: Engine) -> list[int]:
    """Number of steps that each resumed sequence had a row in before it was sent again, from outside."""
    rows: dict[int, int] = defaultdict(int)
    owner: dict[int, int] = {}
    seen: set[int] = set()
    stints = []
    for step in engine.steps:
        for new in step.new_sequences:
            seed = new.sampling.seed
            if seed in seen and rows[seed] >= 0 and seed in rows:
                stints.append((seed, rows[seed]))
            seen.add(seed)
            rows[seed] = 0
            owner[new.slot] = seed
        for slot in unpack_i32(step.slots):
            rows[owner[slot]] += 1
    # The first stint of each is before any resumption.
    first: set[int] = set()
    resumed = []
    for seed, count in stints:
        if seed in first:
            resumed.append(count)
        first.add(seed)
    return resumed


def crowd(engine: Engine, count: int, num_prompt_tokens: int, max_tokens: int) -> list[int]:
    ids = list(range(1, count + 1))
    for request_id in ids:
        engine.add(make_request(request_id, num_prompt_tokens, max_tokens))
    return ids


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("steps", [1, 8, 32, 100])
def test_who_resumes_runs_for_the_steps_stated(page_size: int, steps: int) -> None:
    engine = engine_of(
        {"page_size": page_size, "num_pages": 512 // page_size, "max_num_seqs": 6, "max_num_batched_tokens": 128},
        preemption_resume_steps=steps,
        enable_prefix_caching=False,
    )
    ids = crowd(engine, 14, 20, 200)
    engine.run()
    assert engine.scheduler.num_preemptions > 3
    stints = steps_between_resumption_and_preemption(engine)
    assert all(stint >= steps for stint in stints), stints
    for request_id in ids:
        engine.check_alone(make_request(request_id, 20, 200))
    engine.check_empty()


def test_hysteresis_saves_work() -> None:
    """The same load with and without: fewer preemptions, fewer tokens computed twice."""
    found = {}
    for steps in (0, 64):
        engine = engine_of(
            {"page_size": 4, "num_pages": 128, "max_num_seqs": 8, "max_num_batched_tokens": 128},
            preemption_resume_steps=steps,
            enable_prefix_caching=False,
        )
        crowd(engine, 16, 30, 150)
        engine.run()
        found[steps] = engine.scheduler.stats()
    assert found[64].num_preemptions < found[0].num_preemptions
    assert found[64].preempted_tokens < found[0].preempted_tokens


def test_a_preempted_one_keeps_its_place() -> None:
    engine = engine_of({"num_pages": 12, "max_num_seqs": 3})
    crowd(engine, 6, 20, 100)
    engine.run()
    ends: list[int] = [key[0] for key, choice in engine.choices.items() if choice.finishes]
    resumed = [new.sampling.seed for step in engine.steps for new in step.new_sequences]
    assert len(resumed) > 6
    # Nobody starts for the first time while an earlier one that was thrown out waits.
    started: set[int] = set()
    for step in engine.steps:
        for new in step.new_sequences:
            assert all(earlier in started for earlier in range(1, new.sampling.seed))
            started.add(new.sampling.seed)
    assert sorted(ends) == [1, 2, 3, 4, 5, 6]


def test_tokens_lost_are_those_computed_again() -> None:
    engine = engine_of({"num_pages": 16, "max_num_seqs": 4, "max_num_batched_tokens": 256}, enable_prefix_caching=False)
    ids = crowd(engine, 4, 40, 60)
    engine.run()
    stats = engine.scheduler.stats()
    assert stats.num_preemptions > 0
    needed = sum(40 + 60 - 1 for _ in ids)
    assert stats.preempted_tokens == engine.executor.computed_tokens - needed


def test_what_the_prefix_cache_still_has_is_not_lost() -> None:
    lost = {}
    for caching in (False, True):
        engine = engine_of(
            {"num_pages": 16, "max_num_seqs": 4, "max_num_batched_tokens": 256}, enable_prefix_caching=caching
        )
        crowd(engine, 4, 40, 60)
        engine.run()
        stats = engine.scheduler.stats()
        assert stats.num_preemptions > 0
        assert stats.preempted_tokens == engine.executor.computed_tokens - 4 * 99
        lost[caching] = stats.preempted_tokens
    assert lost[True] < lost[False]


@pytest.mark.parametrize("caching", [False, True])
def test_with_everything_reserved_nobody_is_preempted(caching: bool) -> None:
    engine = engine_of(
        {"num_pages": 30, "max_num_seqs": 8, "max_num_batched_tokens": 64},
        kv_reservation="sequence",
        enable_prefix_caching=caching,
    )
    requests = [make_request(i, 10 + 7 * i, 100, family=0, num_shared_tokens=16) for i in range(1, 9)]
    requests.append(make_request(9, 400, 500))  # as long as the pool: clamped, alone
    for request in requests:
        assert engine.add(request) is None
    engine.run()
    assert engine.scheduler.num_preemptions == 0
    for request in requests:
        engine.check_alone(request)
    engine.check_empty()


def test_reserving_prompts_only_preempts_under_the_same_load() -> None:
    """So that the test above can fail."""
    engine = engine_of({"num_pages": 30, "max_num_seqs": 8, "max_num_batched_tokens": 64})
    for i in range(1, 9):
        engine.add(make_request(i, 10 + 7 * i, 100))
    engine.run()
    assert engine.scheduler.num_preemptions > 0


def test_a_head_that_does_not_fit_is_not_looked_up_again_until_something_leaves() -> None:
    """Looking a long prompt up takes time that grows with it."""
    engine = engine_of({"num_pages": 16, "max_num_seqs": 4, "max_num_batched_tokens": 256})
    engine.add(make_request(1, 100, 60))
    engine.schedule()
    engine.add(make_request(2, 200, 5))
    looked_up = []
    lookup = engine.scheduler._prefixes.lookup
    engine.scheduler._prefixes.lookup = lambda sequence: (looked_up.append(sequence), lookup(sequence))[1]  # type: ignore
    for _ in range(20):
        engine.schedule()
        engine.deliver()
    assert len(looked_up) == 1
    engine.run()
    assert len(engine.choices[2, 0].tokens) == 5
