"""Who is served first, policy by policy, through the scheduler."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_inputs import executor_ready, make_request
from scheduler_simulation import Engine

from ringserve.config import SchedulerConfig, parse_tenant_weights
from ringserve.engine.policy_fair import MAX_ACCOUNTS, FairPolicy
from ringserve.engine.sequence import Request, Sequence
from ringserve.messages.columns import unpack_i32
from ringserve.messages.requests import ServiceTargets, TokenizedRequest

SECOND = 10**9


def engine_of(ready: dict[str, int], **config: Any) -> Engine:
    return Engine(executor_ready(**ready), config=SchedulerConfig(**config))


def starts(engine: Engine) -> list[int]:
    """Requests in the order in which the executor was given them, each time."""
    return [new.sampling.seed for step in engine.steps for new in step.new_sequences]


# ------------------------------------------------------------------------------------------------ priority


def test_fcfs_knows_no_priority() -> None:
    engine = engine_of({"max_num_seqs": 1})
    for request_id, priority in ((1, 5), (2, -5), (3, 0)):
        engine.add(make_request(request_id, 5, 3, priority=priority))
    engine.run()
    assert starts(engine) == [1, 2, 3]


def test_lower_priority_values_are_served_first() -> None:
    engine = engine_of({"max_num_seqs": 1}, scheduling_policy="priority")
    for request_id, priority in ((1, 0), (2, 5), (3, -5), (4, 0), (5, 5)):
        engine.add(make_request(request_id, 5, 3, priority=priority))
    engine.run()
    assert starts(engine) == [3, 1, 4, 2, 5]


def test_a_better_one_takes_the_slot_of_the_worst_that_runs() -> None:
    engine = engine_of({"max_num_seqs": 2}, scheduling_policy="priority")
    requests = [make_request(i, 20, 30, priority=priority) for i, priority in ((1, 3), (2, 2))]
    for request in requests:
        engine.add(request)
    for _ in range(6):
        engine.schedule()
        engine.deliver()
    urgent = make_request(3, 20, 30, priority=0)
    engine.add(urgent)
    engine.schedule()
    assert starts(engine)[2:] == [3]
    assert engine.scheduler.stats().num_waiting == 1
    engine.run()
    assert engine.choices[1, 0].finishes[0].num_preemptions == 1
    assert engine.choices[2, 0].finishes[0].num_preemptions == 0
    for request in (*requests, urgent):
        engine.check_alone(request)
    engine.check_empty()


def test_a_better_one_takes_pages_but_not_in_vain() -> None:
    """Nobody is thrown out where the pages of all worse ones would not do."""
    engine = engine_of({"page_size": 16, "num_pages": 10, "max_num_batched_tokens": 256}, scheduling_policy="priority")
    engine.add(make_request(1, 60, 40, priority=0))
    engine.add(make_request(2, 30, 20, priority=9))
    engine.schedule()
    engine.deliver()
    engine.add(make_request(3, 100, 20, priority=1))  # 7 pages; the others hold 4 and 2 of 10
    engine.schedule()
    assert engine.scheduler.stats().num_preemptions == 0
    engine.abort(3)
    fits = make_request(4, 50, 20, priority=1)
    engine.add(fits)
    engine.schedule()
    assert engine.scheduler.stats().num_preemptions == 1
    assert starts(engine)[-1] == 4
    engine.run()
    engine.check_alone(fits)
    engine.check_empty()


def test_equals_do_not_throw_each_other_out() -> None:
    engine = engine_of({"max_num_seqs": 1}, scheduling_policy="priority", priority_aging=1e-9)
    engine.add(make_request(1, 20, 30))
    engine.schedule()
    engine.add(make_request(2, 20, 30))
    engine.run()
    assert engine.scheduler.stats().num_preemptions == 0


def test_a_better_one_overtakes_a_prompt_under_way() -> None:
    engine = engine_of({"max_num_batched_tokens": 16}, scheduling_policy="priority")
    engine.add(make_request(1, 200, 2, priority=1))
    engine.schedule()
    engine.deliver()
    engine.add(make_request(2, 10, 2))
    step = engine.schedule()
    assert step is not None
    assert dict(zip(unpack_i32(step.slots), unpack_i32(step.num_tokens), strict=True)) == {1: 10, 0: 6}


def test_waiting_is_worth_priority() -> None:
    """With a level for each 10 ns, a request is passed only by what comes within 10 ns for each level between them."""
    engine = engine_of({"max_num_seqs": 1}, scheduling_policy="priority", priority_aging=1e-8)
    engine.add(make_request(1, 5, 200, priority=-99))
    engine.schedule()
    engine.add(make_request(2, 5, 2, priority=3))
    engine.now_ns += 20
    engine.add(make_request(3, 5, 2, priority=0))
    engine.now_ns += 20
    engine.add(make_request(4, 5, 2, priority=0))
    engine.run()
    assert starts(engine) == [1, 3, 2, 4]


# ---------------------------------------------------------------------------------------------------- fair


SHAPES = {"a": (10, 4), "b": (60, 40)}
"""Longest prompts and answers by tenant."""
STEPS = 1500


class Backlog:
    """Tenants that always have requests waiting, and the service that each of them got."""

    def __init__(self, engine: Engine, shapes: dict[str, tuple[int, int]], rng: random.Random) -> None:
        self.engine = engine
        self.shapes = shapes
        self.rng = rng
        self.requests: dict[int, TokenizedRequest] = {}

    def refill(self, tenant: str) -> None:
        waiting = sum(s.request.tenant == tenant for s in self.engine.scheduler._waiting)
        for _ in range(waiting, 5):
            prompt, output = self.shapes[tenant]
            request_id = len(self.requests) + 1
            request = make_request(request_id, self.rng.randint(1, prompt), self.rng.randint(1, output), tenant=tenant)
            self.requests[request_id] = request
            assert self.engine.add(request) is None

    def step(self) -> None:
        while self.engine.schedule() is not None:
            pass
        self.engine.deliver()

    def service(self, config: SchedulerConfig) -> dict[str, float]:
        """Counted from outside: prompts of those that started, and every token that came out."""
        started = set(starts(self.engine))
        service = dict.fromkeys(self.shapes, 0.0)
        for request_id, request in self.requests.items():
            if request_id in started:
                service[request.tenant] += config.input_token_price * (len(request.prompt_token_ids) // 4)
            if (choice := self.engine.choices.get((request_id, 0))) is not None:
                service[request.tenant] += config.output_token_price * len(choice.tokens)
        return service


@pytest.mark.parametrize(("weights", "num_pages"), [("", 64), ("", 9), ("a=3,b=1", 64)])
@pytest.mark.parametrize(("input_price", "output_price"), [(1.0, 2.0), (1.0, 0.5)])
def test_backlogged_tenants_get_equal_service(
    weights: str, num_pages: int, input_price: float, output_price: float
) -> None:
    """The published bound, over every interval between two of the steps looked at."""
    config = SchedulerConfig(
        scheduling_policy="fair",
        tenant_weights=weights,
        input_token_price=input_price,
        output_token_price=output_price,
        enable_prefix_caching=False,
    )
    share = {"a": 1.0, "b": 1.0, **parse_tenant_weights(weights)}
    ready = executor_ready(num_pages=num_pages, max_num_seqs=4, max_num_batched_tokens=32)
    engine = Engine(ready, config=config)
    shapes = SHAPES
    backlog = Backlog(engine, shapes, random.Random(3))
    # Tokens that the running sequences can hold at once: by slots and by pages.
    held = min(4 * max(prompt + output for prompt, output in shapes.values()), num_pages * 16)
    bound = 2 * max(input_price * 60, output_price * held)
    gaps = [0.0]
    for _ in range(STEPS):
        for tenant in shapes:
            backlog.refill(tenant)
        backlog.step()
        if len(engine.steps) % 10 == 0:
            service = backlog.service(config)
            gaps.append(service["a"] / share["a"] - service["b"] / share["b"])
    assert max(gaps) - min(gaps) <= bound
    total = backlog.service(config)
    assert min(total[tenant] / share[tenant] for tenant in shapes) > 2 * bound  # long enough to tell


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(
    shapes=st.fixed_dictionaries(
        {"a": st.tuples(st.integers(1, 70), st.integers(1, 50)), "b": st.tuples(st.integers(1, 70), st.integers(1, 50))}
    ),
    share=st.sampled_from([1.0, 2.5]),
    prices=st.sampled_from([(1.0, 2.0), (3.0, 1.0), (0.2, 1.0)]),
    num_pages=st.sampled_from([9, 14, 64]),
    seed=st.integers(0, 99),
)
def test_the_bound_holds_for_any_two_tenants(
    shapes: dict[str, tuple[int, int]], share: float, prices: tuple[float, float], num_pages: int, seed: int
) -> None:
    config = SchedulerConfig(
        scheduling_policy="fair",
        tenant_weights=f"a={share}",
        input_token_price=prices[0],
        output_token_price=prices[1],
        enable_prefix_caching=False,
    )
    engine = Engine(executor_ready(num_pages=num_pages, max_num_seqs=4, max_num_batched_tokens=32), config=config)
    backlog = Backlog(engine, shapes, random.Random(seed))
    longest = max(prompt for prompt, _ in shapes.values())
    held = min(4 * max(prompt + output for prompt, output in shapes.values()), num_pages * 16)
    gaps = [0.0]
    for turn in range(400):
        for tenant in shapes:
            backlog.refill(tenant)
        backlog.step()
        if turn % 20 == 0:
            service = backlog.service(config)
            gaps.append(service["a"] / share - service["b"])
    assert max(gaps) - min(gaps) <= 2 * max(prices[0] * longest, prices[1] * held)


def test_first_come_first_served_breaks_the_bound() -> None:
    """The same load, so that the test above can fail."""
    config = SchedulerConfig(enable_prefix_caching=False)
    engine = Engine(executor_ready(max_num_seqs=4, max_num_batched_tokens=32), config=config)
    backlog = Backlog(engine, SHAPES, random.Random(3))
    for _ in range(STEPS):
        for tenant in backlog.shapes:
            backlog.refill(tenant)
        backlog.step()
    service = backlog.service(config)
    assert abs(service["a"] - service["b"]) > 2 * max(60, 2 * 4 * 100)


def test_a_flood_does_not_delay_another_tenant() -> None:
    engine = engine_of({"max_num_seqs": 1}, scheduling_policy="fair")
    for request_id in range(1, 11):
        engine.add(make_request(request_id, 10, 5, tenant="flood"))
    engine.schedule()
    engine.add(make_request(11, 10, 5, tenant="other"))
    engine.run()
    assert starts(engine)[:3] == [1, 11, 2]


def test_nobody_saves_up_service_by_being_away() -> None:
    engine = engine_of({"max_num_seqs": 1}, scheduling_policy="fair")
    engine.add(make_request(100, 10, 5, tenant="late"))
    engine.run()
    for request_id in range(1, 21):
        engine.add(make_request(request_id, 10, 5, tenant="busy"))
    while len(starts(engine)) < 11:
        engine.schedule()
        engine.deliver()
    for request_id in range(101, 111):
        engine.add(make_request(request_id, 10, 5, tenant="late"))
    engine.run()
    later = starts(engine)[11:]
    assert abs(sum(each > 100 for each in later[:8]) - 4) <= 1


def test_cached_tokens_are_not_charged() -> None:
    engine = engine_of({"page_size": 16}, scheduling_policy="fair", output_token_price=1.0)
    for request_id in (1, 2):
        engine.add(make_request(request_id, 64, 1, family=0, num_shared_tokens=64, tenant="a"))
        engine.run()
    policy = engine.scheduler._waiting
    assert isinstance(policy, FairPolicy)
    assert policy.counters() == {"a": 64 + 1 + 16 + 1}


def test_accounts_of_tenants_long_gone_are_dropped() -> None:
    policy = FairPolicy(1.0, 1.0, {})
    for number in range(3 * MAX_ACCOUNTS):
        request = Request.of(make_request(number, 3, 3, tenant=f"tenant {number}"), 100, frozenset(), 0)
        sequence = Sequence(request, 0, number)
        policy.add(sequence)
        assert policy.head() is sequence
        policy.remove(sequence)
        policy.charge_prompt(sequence, 1)
    assert len(policy.counters()) <= MAX_ACCOUNTS


@pytest.mark.parametrize("text", ["a", "a=", "a=0", "a=-1", "=1x", "a=inf", "a=1,b"])
def test_weights_that_make_no_sense(text: str) -> None:
    with pytest.raises(ValueError, match="TENANT=WEIGHT"):
        parse_tenant_weights(text)


def test_weights() -> None:
    assert parse_tenant_weights("a=2, b=0.5,c=d=1") == {"a": 2.0, "b": 0.5, "c=d": 1.0}
    assert parse_tenant_weights("") == {}


# ------------------------------------------------------------------------- pages that the displaced share


def test_pages_shared_with_a_victim_are_not_had_twice() -> None:
    """What a newcomer shares with one that it would throw out comes free with that one, and goes to the newcomer."""
    engine = engine_of({"page_size": 16, "num_pages": 12, "max_num_batched_tokens": 256}, scheduling_policy="priority")
    shared: dict[str, Any] = {"family": 0, "num_shared_tokens": 64}
    engine.add(make_request(1, 70, 30, priority=0))  # five pages
    engine.add(make_request(2, 70, 30, priority=9, **shared))  # five
    engine.schedule()
    engine.deliver()
    newcomer = make_request(3, 120, 8, priority=1, **shared)  # eight, four of them those of the second
    engine.add(newcomer)
    engine.schedule()
    assert engine.scheduler.num_preemptions == 0  # in vain: there would be three for the other four
    engine.run()
    engine.check_alone(newcomer)
    engine.check_empty()


def test_who_needs_all_pages_takes_them_from_the_only_one_that_runs() -> None:
    engine = engine_of({"page_size": 16, "num_pages": 12, "max_num_batched_tokens": 256}, scheduling_policy="priority")
    engine.add(make_request(1, 20, 100, priority=9))
    engine.schedule()
    engine.deliver()
    newcomer = make_request(2, 12 * 16 - 2, 5, priority=0)
    engine.add(newcomer)
    engine.schedule()
    assert starts(engine) == [1, 2]
    engine.run()
    engine.check_alone(newcomer)
    engine.check_empty()


@pytest.mark.parametrize("policy", ["priority", "deadline"])
@pytest.mark.parametrize("num_pages", [10, 11, 12, 13, 14, 15])
@pytest.mark.parametrize("num_shared_tokens", [16, 48, 64])
def test_displacing_one_whose_prompt_begins_alike(policy: str, num_pages: int, num_shared_tokens: int) -> None:
    """Newcomers of any size, beside one that makes room and one that does not; few pages are free."""
    for num_prompt_tokens in range(70, 16 * num_pages - 8, 16):
        engine = engine_of({"num_pages": num_pages, "max_num_batched_tokens": 256}, scheduling_policy=policy)
        soon = ServiceTargets(due_ns=SECOND)
        shared: dict[str, Any] = {"family": 0, "num_shared_tokens": num_shared_tokens}
        requests = [
            make_request(1, 70, 30, priority=0, targets=soon),
            make_request(2, 70, 30, priority=9, **shared),
            make_request(3, num_prompt_tokens, 8, priority=1, targets=ServiceTargets(due_ns=SECOND + 1), **shared),
        ]
        for request in requests:
            assert engine.add(request) is None
            engine.schedule()
            engine.deliver()
        engine.run()
        for request in requests:
            engine.check_alone(request)
        engine.check_empty()
