"""Prompts that begin alike are computed once; nothing that is shared is ever wrong, written to or lost."""

from __future__ import annotations

from typing import Any

import pytest
from scheduler_inputs import executor_ready, make_request
from scheduler_simulation import Engine

from ringserve.config import SchedulerConfig
from ringserve.messages.columns import pack_i32
from ringserve.messages.requests import ResumedChoice, TokenizedRequest

WITHOUT = SchedulerConfig(enable_prefix_caching=False)


def related(
    request_id: int, num_prompt_tokens: int = 100, num_shared_tokens: int = 80, **more: Any
) -> TokenizedRequest:
    """A request whose prompt begins like that of all the others."""
    return make_request(request_id, num_prompt_tokens, 5, family=0, num_shared_tokens=num_shared_tokens, **more)


def cached_tokens(engine: Engine, request_id: int, choice: int = 0) -> int:
    (start,) = engine.choices[request_id, choice].starts
    return start.num_cached_tokens


@pytest.mark.parametrize("page_size", [16, 64])
def test_a_second_request_computes_only_what_is_new(page_size: int) -> None:
    engine = Engine(executor_ready(page_size, num_pages=200, max_model_len=2000))
    first, second = related(1, 1020, 1000), related(2, 1020, 1000)
    engine.add(first)
    engine.run()
    before = engine.executor.computed_tokens
    assert before == 1020 + 4
    engine.add(second)
    engine.run()
    shared = 1000 // page_size * page_size
    assert engine.executor.computed_tokens - before == 1020 - shared + 4
    assert engine.executor.cached_tokens == cached_tokens(engine, 2) == shared
    assert cached_tokens(engine, 1) == 0
    stats = engine.scheduler.stats()
    assert (stats.num_prefix_queries, stats.num_prefix_hits) == (2040, shared)
    engine.check_alone(first)
    engine.check_alone(second)
    engine.check_empty()


def test_pages_are_shared_while_their_first_owner_still_runs() -> None:
    engine = Engine(executor_ready(num_pages=12))
    first, second = related(1), related(2)
    engine.add(first)
    while not engine.choices.get((1, 0)):
        engine.schedule()
        engine.deliver()
    engine.add(second)
    engine.schedule()
    assert engine.scheduler.stats().num_free_pages == 12 - 7 - 2
    engine.run()
    engine.check_alone(first)
    engine.check_alone(second)
    engine.check_empty()


@pytest.mark.parametrize("num_prompt_tokens", [15, 16, 17, 32, 33, 100])
def test_the_last_token_is_always_computed(num_prompt_tokens: int) -> None:
    engine = Engine(executor_ready())
    first, again = (related(i, num_prompt_tokens, num_prompt_tokens) for i in (1, 2))
    engine.add(first)
    engine.run()
    engine.add(again)
    engine.run()
    assert cached_tokens(engine, 2) == (num_prompt_tokens - 1) // 16 * 16
    engine.check_alone(again)


def test_choices_share_their_prompts_pages() -> None:
    engine = Engine(executor_ready(num_pages=40, max_num_batched_tokens=256))
    request = related(1, n=5)
    engine.add(request)
    engine.run()
    assert engine.executor.computed_tokens == 100 + 4 * (100 - 96) + 5 * 4
    assert [cached_tokens(engine, 1, choice) for choice in range(5)] == [0, 96, 96, 96, 96]
    engine.check_alone(request)
    engine.check_empty()


def test_requests_that_come_together_compute_their_common_prefix_once() -> None:
    engine = Engine(executor_ready(max_num_batched_tokens=48))
    requests = [related(i) for i in range(1, 5)]
    for request in requests:
        engine.add(request)
    engine.run()
    assert engine.executor.computed_tokens == 100 + 3 * 20 + 4 * 4
    for request in requests:
        engine.check_alone(request)


@pytest.mark.parametrize("after", [1, 2])
def test_whoever_waits_for_a_page_goes_on_when_its_owner_ends(after: int) -> None:
    engine = Engine(executor_ready(max_num_batched_tokens=20))
    second = related(2)
    engine.add(related(1))
    engine.add(second)
    for _ in range(after):
        engine.schedule()
    assert engine.scheduler.stats().num_waiting == 1
    engine.abort(1)
    engine.run()
    assert cached_tokens(engine, 2) == 20 * after // 16 * 16
    engine.check_alone(second)
    engine.check_empty()


def test_nothing_is_shared_between_salts() -> None:
    engine = Engine(executor_ready())
    requests = [related(i, cache_salt=salt) for i, salt in enumerate(["", "a", "b", "a"], start=1)]
    for request in requests:
        engine.add(request)
        engine.run()
        engine.check_alone(request)
    assert [cached_tokens(engine, request.request_id) for request in requests] == [0, 0, 0, 80]


def test_the_same_tokens_elsewhere_are_not_the_same() -> None:
    """A page depends on everything before it."""
    engine = Engine(executor_ready())
    block = list(range(16))
    base = make_request(1, 3, 2)
    for request_id, ids in ((1, block + block + [3]), (2, [7] * 16 + block + [3]), (3, block[::-1] + block + [3])):
        request = TokenizedRequest(request_id, pack_i32(ids), base.sampling, 1, 2)
        engine.add(request)
        engine.run()
        engine.check_alone(request)
    assert engine.executor.cached_tokens == 0


def test_switched_off() -> None:
    engine = Engine(executor_ready(), config=WITHOUT)
    requests = [related(1, n=2), related(2)]
    for request in requests:
        engine.add(request)
        engine.run()
        engine.check_alone(request)
    assert engine.executor.cached_tokens == 0
    stats = engine.scheduler.stats()
    assert (stats.num_prefix_queries, stats.num_prefix_hits) == (0, 0)


def test_prompt_logprobs_are_computed_from_every_token() -> None:
    engine = Engine(executor_ready())
    engine.add(related(1))
    engine.run()
    asking = related(2, prompt_logprobs=0)
    engine.add(asking)
    engine.run()
    assert cached_tokens(engine, 2) == 0
    assert sum(len(chunk.columns.counts) // 4 for chunk in engine.prompt_logprobs) == 100
    engine.check_alone(asking)
    assert engine.scheduler.stats().num_prefix_queries == 100
    engine.add(related(3))
    engine.run()
    assert cached_tokens(engine, 3) == 80


def test_answers_are_found_by_the_next_turn() -> None:
    engine = Engine(executor_ready())
    first = make_request(1, 40, 30)
    engine.add(first)
    engine.run()
    history = list(range(5))
    prompt = first.prompt_token_ids + pack_i32(engine.choices[1, 0].tokens) + pack_i32(history)
    engine.add(TokenizedRequest(2, prompt, first.sampling, 1, 3))
    engine.run()
    assert cached_tokens(engine, 2) == (40 + 29) // 16 * 16  # the last token was never computed


def test_a_preempted_sequence_finds_its_own_pages_again() -> None:
    def run(config: SchedulerConfig) -> int:
        engine = Engine(executor_ready(num_pages=10, max_num_batched_tokens=256), config=config)
        requests = [make_request(i, 40, 60) for i in (1, 2)]
        for request in requests:
            engine.add(request)
        engine.run()
        for request in requests:
            engine.check_alone(request)
        assert engine.scheduler.stats().num_preemptions > 0
        assert cached_tokens(engine, 2) == 0
        engine.check_empty()
        return engine.executor.computed_tokens

    assert run(SchedulerConfig()) < run(WITHOUT)


def test_a_resumed_request_finds_what_it_had_computed() -> None:
    engine = Engine(executor_ready())
    request = make_request(1, 40, 60)
    engine.add(request)
    for _ in range(40):
        engine.schedule()
        engine.deliver()
    engine.abort(1)
    known = engine.choices.pop((1, 0)).tokens
    before = engine.executor.computed_tokens
    engine.add(make_request(1, 40, 60, resumed=(ResumedChoice(0, pack_i32(known), 0),)))
    engine.schedule()
    assert engine.executor.computed_tokens - before <= 16
    assert engine.executor.cached_tokens >= 40 + len(known) - 16


def test_the_least_recently_used_pages_are_given_up_and_never_a_held_one() -> None:
    engine = Engine(executor_ready(page_size=16, num_pages=12))
    engine.add(make_request(1, 40, 2))
    engine.run()
    engine.add(make_request(2, 40, 2))
    engine.run()
    engine.add(make_request(3, 40, 2, family=1, num_shared_tokens=40))  # request 2's pages are the oldest now
    engine.run()
    assert engine.executor.cached_tokens == 32
    big = make_request(4, 16 * 9, 2)
    engine.add(big)
    engine.run()
    engine.check_alone(big)
    for request_id, family, found in ((5, 1, 32), (6, 2, 0)):
        engine.add(make_request(request_id, 40, 2, family=family, num_shared_tokens=40))
        engine.run()
        assert cached_tokens(engine, request_id) == found
    engine.check_empty()


def test_a_full_cache_is_no_obstacle() -> None:
    engine = Engine(executor_ready(page_size=16, num_pages=6))
    for request_id in range(1, 20):
        request = make_request(request_id, 16 * 5, 10)
        engine.add(request)
        engine.run()
        engine.check_alone(request)
    engine.check_empty()


def test_a_failed_sequence_leaves_no_page_of_what_it_did_not_draw() -> None:
    engine = Engine(executor_ready())
    request = make_request(1, 20, 40)
    engine.executor.fail_at[1, 0] = 11
    engine.add(request)
    engine.run()
    assert engine.choices[1, 0].finishes[0].reason == "error"
    engine.executor.fail_at.clear()
    engine.choices.clear()
    engine.add(request)
    engine.run()
    engine.check_alone(request)


def test_integrity_sees_a_page_under_a_wrong_name() -> None:
    engine = Engine(executor_ready())
    engine.add(related(1))
    engine.schedule()
    engine.schedule()
    scheduler = engine.scheduler
    sequence = next(iter(scheduler._running))
    assert scheduler.check_integrity() == []
    table = sequence.block_table
    table[0], table[1] = table[1], table[0]
    assert any("under another page's key" in problem for problem in scheduler.check_integrity())
    table[0], table[1] = table[1], table[0]
    sequence.num_registered_pages -= 1
    assert any("before it is full" in problem for problem in scheduler.check_integrity())
