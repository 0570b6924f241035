"""The scheduler's half of swapping: what goes out, what comes back, and that no order of events mixes pages up."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from scheduler_inputs import executor_ready, make_request
from scheduler_simulation import Engine
from simulated_tokens import run_alone

from ringserve.config import SchedulerConfig
from ringserve.engine.kv_manager import KVManager
from ringserve.engine.prefix_sharing import PrefixSharing
from ringserve.engine.sequence import Request, Sequence
from ringserve.engine.sessions import Sessions
from ringserve.engine.step_time import GUESS, StepTimeModel
from ringserve.engine.swap_space import SwapCosts, SwapSpace
from ringserve.engine.swapping import Swapping
from ringserve.engine.wait_prediction import WaitPredictor
from ringserve.messages.columns import pack_i32, unpack_i32
from ringserve.messages.sessions import SessionRef
from ringserve.messages.steps import NewSequence, PageSwaps

PAGE_SIZE = 4
FREE_OF_CHARGE = SwapCosts(bytes_per_page=1000, bytes_per_second=1e30, seconds_per_swap=0.0)


def sequence_of(number: int, num_tokens: int, max_tokens: int = 50) -> Sequence:
    request = Request.of(make_request(number, num_tokens, max_tokens), 500, frozenset(), 1)
    return Sequence(request, 0, number)


class World:
    """KV pages, host pages and sequences in any state, without a planner; what a page holds is (sequence, index)."""

    def __init__(self, seed: str, num_pages: int, num_host_pages: int) -> None:
        self.random = Random(seed)
        self.swapping = Swapping(SwapSpace(num_host_pages), FREE_OF_CHARGE, PAGE_SIZE, StepTimeModel())
        self.free = list(range(1, num_pages + 1))
        self.memory: dict[int, tuple[int, int]] = {}
        self.host_memory: dict[int, tuple[int, int]] = {}
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.entered: dict[Sequence, int] = {}
        """Those that the next step starts, with the number of their first pages that it need not get from the host."""
        self.num_both = 0

    def take_pages(self, sequence: Sequence, count: int) -> None:
        self.random.shuffle(self.free)
        sequence.block_table += [self.free.pop() for _ in range(count)]

    def start(self, number: int) -> None:
        sequence = sequence_of(number, self.random.randint(2, 20))
        num_tokens = self.random.randint(1, sequence.num_known_tokens - 1)
        count = -(-num_tokens // PAGE_SIZE)
        if count <= len(self.free):
            self.take_pages(sequence, count)
            sequence.num_computed_tokens = num_tokens
            self.running.append(sequence)
            self.entered[sequence] = count

    def preempt(self) -> None:
        candidates = [each for each in self.running if each not in self.entered]  # not admitted by the same plan
        if candidates:
            victim = self.random.choice(candidates)
            self.swapping.swap_out(victim)
            self.running.remove(victim)
            self.leave(victim)
            self.waiting.append(victim)

    def resume(self, cached: int) -> None:
        """At most ``cached`` pages are found by the prefix cache."""
        swapped = [each for each in self.waiting if each.num_swapped_tokens]
        if not swapped:
            return
        sequence = self.random.choice(swapped)
        num_tokens = sequence.num_swapped_tokens
        cached = min(cached, (sequence.num_known_tokens - 1) // PAGE_SIZE)
        count = max(-(-num_tokens // PAGE_SIZE), cached)
        if count > len(self.free):
            return
        self.take_pages(sequence, count)
        sequence.num_computed_tokens = cached * PAGE_SIZE
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self.swapping.swap_in(sequence, cached)
        assert sequence.num_computed_tokens == max(num_tokens, cached * PAGE_SIZE)
        self.entered[sequence] = cached

    def end(self) -> None:
        candidates = [each for each in (*self.running, *self.waiting) if each not in self.entered]
        if candidates:
            sequence = self.random.choice(candidates)
            (self.running if sequence in self.running else self.waiting).remove(sequence)
            self.swapping.forget(sequence)
            self.leave(sequence)

    def leave(self, sequence: Sequence) -> None:
        self.free += sequence.block_table
        sequence.block_table.clear()
        sequence.num_computed_tokens = 0

    def step(self) -> None:
        """The executor's part: swaps out, swaps in, then the step writes."""
        swaps = self.swapping.take()
        if swaps is not None:
            self.apply(swaps)
        for sequence, count in self.entered.items():
            self.memory.update({page: (sequence.arrival, i) for i, page in enumerate(sequence.block_table[:count])})
        self.entered = {}
        for sequence in self.running:
            expected = [(sequence.arrival, index) for index in range(len(sequence.block_table))]
            assert [self.memory[page] for page in sequence.block_table] == expected
        assert self.swapping.check_integrity(self.waiting, self.running) == []

    def apply(self, swaps: PageSwaps) -> None:
        out, back = unpack_i32(swaps.out_pages), unpack_i32(swaps.in_pages)
        self.num_both += bool(out) and bool(back)
        for page, host_page in zip(out, unpack_i32(swaps.out_host_pages), strict=True):
            self.host_memory[host_page] = self.memory[page]
        for page, host_page in zip(back, unpack_i32(swaps.in_host_pages), strict=True):
            self.memory[page] = self.host_memory.pop(host_page)


@pytest.mark.parametrize("num_host_pages", [1, 7, 40])
def test_pages_find_back_in_any_order_of_events(num_host_pages: int) -> None:
    """A step begins and ends several sequences; some plans come to nothing, and their swaps go with a later message."""
    world = World(f"host pages {num_host_pages}", num_pages=30, num_host_pages=num_host_pages)
    for number in range(3000):
        match world.random.choice(["start", "preempt", "preempt", "resume", "resume", "end", "step", "step"]):
            case "start":
                world.start(number)
            case "preempt":
                world.preempt()
            case "resume":
                world.resume(world.random.choice([0, 0, 0, 1, 2, 9]))
            case "end":
                world.end()
            case _:
                world.step()
    world.step()
    assert world.swapping.pages_out > world.swapping.pages_in > 50
    assert world.num_both > 20
    for sequence in [*world.running, *world.waiting]:
        world.swapping.forget(sequence)
    assert world.swapping.num_held == 0


def crowd(caching: bool = True, **limits: int | float) -> Engine:
    """Eight long answers in a pool that holds three."""
    sizes = {"page_size": 16, "num_pages": 28, "max_num_seqs": 8, "max_num_batched_tokens": 256, **limits}
    engine = Engine(executor_ready(**sizes), config=SchedulerConfig(enable_prefix_caching=caching))  # type: ignore[arg-type]
    for number in range(1, 9):
        engine.add(make_request(number, 40, 100))
    return engine


@pytest.mark.parametrize("caching", [False, True])
def test_with_room_nothing_is_computed_twice(caching: bool) -> None:
    engine = crowd(caching, num_host_pages=100)
    engine.run()
    stats = engine.scheduler.stats()
    assert stats.num_preemptions > 3
    assert stats.preempted_tokens == 0
    assert stats.num_computed_tokens == engine.executor.computed_tokens == 8 * 139
    assert 0 < stats.swapped_in_pages <= stats.swapped_out_pages
    # What the prefix cache still had did not come back from the host.
    assert (stats.swapped_in_pages < stats.swapped_out_pages) == caching
    for number in range(1, 9):
        engine.check_alone(make_request(number, 40, 100))
    engine.check_empty()


def test_tokens_are_computed_again_or_come_back() -> None:
    """Together they are what preemption took; nothing is counted twice."""
    without = crowd(False)
    without.run()
    lost = without.scheduler.stats().preempted_tokens
    some = crowd(False, num_host_pages=5)
    some.run()
    stats = some.scheduler.stats()
    assert 0 < stats.swapped_in_tokens < lost
    assert stats.preempted_tokens + stats.swapped_in_tokens == lost  # the same steps otherwise
    assert stats.preempted_tokens == some.executor.computed_tokens - 8 * 139 == some.executor.recomputed_tokens


def test_a_full_swap_space_and_a_slow_bus_mean_computing_again() -> None:
    for engine in (crowd(num_host_pages=1), crowd(num_host_pages=100, swap_bytes_per_second=1e-3)):
        engine.run()
        stats = engine.scheduler.stats()
        assert stats.num_preemptions > 0
        assert stats.preempted_tokens > 0
        assert (stats.swapped_out_pages, stats.swapped_in_pages, stats.swapped_in_tokens) == (0, 0, 0)
        assert all(step.swaps is None for step in engine.steps)
        engine.check_empty()


def run_until_swapped(engine: Engine) -> Sequence:
    """One of those that are on the host then."""
    while not engine.scheduler.stats().num_swapped_pages:
        if engine.schedule() is None:
            assert engine.deliver()
    on_host = [each for each in engine.scheduler._waiting if each.num_swapped_tokens]
    return on_host[-1]


@pytest.mark.parametrize("reason", ["abort", "stop"])
def test_who_is_aborted_on_the_host_leaves_it(reason: str) -> None:
    engine = crowd(num_host_pages=100)
    sequence = run_until_swapped(engine)
    request_id = sequence.request.request_id
    before = engine.scheduler.stats().num_swapped_pages
    num_pages = -(-sequence.num_swapped_tokens // 16)
    engine.abort(request_id, reason=reason)
    assert engine.scheduler.stats().num_swapped_pages == before - num_pages
    engine.run()
    assert engine.choices[request_id, 0].finishes[0].reason == reason
    for number in range(1, 9):
        if number != request_id:
            engine.check_alone(make_request(number, 40, 100))
    engine.check_empty()


def test_who_fails_while_on_the_host_leaves_it() -> None:
    """The step in flight at its preemption yields no token for it."""
    victim = run_until_swapped(crowd(num_host_pages=100))
    assert victim.num_pending_tokens > 0
    request_id = victim.request.request_id
    engine = crowd(num_host_pages=100)
    engine.executor.fail_at[request_id, 0] = len(victim.output_token_ids)
    assert run_until_swapped(engine).request.request_id == request_id
    while (request_id, 0) not in engine.choices or not engine.choices[request_id, 0].finishes:
        engine.deliver()
    assert engine.choices[request_id, 0].finishes[0].reason == "error"
    engine.run()
    engine.check_empty()


def test_a_prompt_half_computed_goes_on_behind_what_comes_back() -> None:
    """By priority: the newcomer throws out one in the middle of its prompt, which is not begun again."""
    ready = executor_ready(num_pages=20, max_num_seqs=1, max_num_batched_tokens=32, num_host_pages=20)
    config = SchedulerConfig(scheduling_policy="priority", priority_aging=0, enable_prefix_caching=False)
    engine = Engine(ready, config=config)
    long = make_request(1, 200, 4, prompt_logprobs=0, priority=5)
    engine.add(long)
    engine.schedule()
    engine.schedule()
    engine.add(make_request(2, 20, 3, priority=0))
    engine.run()
    swapped = [step for step in engine.steps if step.swaps is not None]
    assert [bool(step.swaps.out_pages) for step in swapped if step.swaps is not None] == [True, False]
    (back,) = swapped[1].new_sequences
    assert isinstance(back, NewSequence)
    assert back.num_computed_tokens == 64
    assert engine.scheduler.stats().num_computed_tokens == 200 + 3 + 20 + 2
    positions = [chunk.start + i for chunk in engine.prompt_logprobs for i in range(len(chunk.columns.counts) // 4)]
    assert positions == list(range(200))
    engine.check_alone(long)
    engine.check_empty()


def test_pages_on_the_host_are_not_mixed_with_a_sessions_last_page() -> None:
    """A turn thrown out in the middle of its prompt; meanwhile the turn before it ends, and its session keeps a last
    page that holds less than what went to the host."""
    ready = executor_ready(num_pages=20, max_num_seqs=1, max_num_batched_tokens=30, num_host_pages=20)
    engine = Engine(ready, config=SchedulerConfig(scheduling_policy="priority", priority_aging=0))
    talk = SessionRef("key-1", "talk")
    before = msgspec.structs.replace(make_request(2, 20, 7, priority=0), session=talk)
    said = before.prompt_token_ids + pack_i32(run_alone(before, 0, 500)[0])
    more = make_request(1, 33, 4, priority=5)
    turn = msgspec.structs.replace(more, prompt_token_ids=said + more.prompt_token_ids, session=talk)
    engine.add(turn)
    engine.schedule()
    engine.add(before)
    engine.run()
    stats = engine.scheduler.stats()
    assert (stats.swapped_out_pages, stats.swapped_in_pages) == (2, 1)  # the first is in the cache
    assert stats.swapped_in_tokens == 30 - 16
    assert stats.num_computed_tokens == 60 + 3 + 20 + 6 - 16
    engine.check_alone(before)
    engine.check_alone(turn)
    engine.check_empty()


def test_what_the_host_has_is_not_waited_for() -> None:
    """A page that another sequence is just computing is waited for by whoever would compute it, not by one that has it
    on the host."""
    swapped, other = sequence_of(1, 40), sequence_of(1, 40)
    kv = KVManager(20, 16)
    prefixes = PrefixSharing(kv, True, Sessions(kv, SchedulerConfig()))
    other.block_table = kv.grow(other.block_table, 40) or []
    prefixes.start(other, [])
    assert prefixes.lookup(swapped) is None
    swapped.num_swapped_tokens = 15
    assert prefixes.lookup(swapped) is None
    swapped.num_swapped_tokens = 16
    assert prefixes.lookup(swapped) == []


def test_who_waits_behind_one_on_the_host_waits_less() -> None:
    predictor = WaitPredictor(StepTimeModel(GUESS), max_num_seqs=4, max_num_batched_tokens=64, capacity=5000)
    ahead, newcomer = sequence_of(1, 400), sequence_of(2, 10).request
    waits = []
    for ahead.num_swapped_tokens in (0, 399):
        prediction = predictor.predict(newcomer, [], [ahead])
        assert prediction is not None
        waits.append(prediction.wait)
    prefill = GUESS.of_row(200, 400)
    assert waits[0] - waits[1] > 0.9 * prefill


def test_a_step_with_swaps_says_nothing_of_how_long_steps_take() -> None:
    engine = crowd(num_host_pages=100)
    observed = []
    model = engine.scheduler.step_times
    observe = model.observe
    model.observe = lambda shape, seconds: (observed.append(shape), observe(shape, seconds))[1]  # type: ignore
    engine.run()
    with_swaps = sum(step.swaps is not None for step in engine.steps)
    assert with_swaps > 2
    assert len(observed) == len(engine.steps) - with_swaps


def test_who_goes_in_vain_comes_back_with_the_same_message() -> None:
    """It finds no page for its next token beside one whose last is just being drawn: a plan that comes to nothing. With
    the next one it is alone, so that its pages go out and come back at once."""
    ready = executor_ready(page_size=4, num_pages=6, num_host_pages=6)
    engine = Engine(ready, config=SchedulerConfig(enable_prefix_caching=False))
    requests = [make_request(1, 4, 9), make_request(2, 4, 15)]
    for request in requests:
        engine.add(request)
    engine.run()
    (swaps,) = [step.swaps for step in engine.steps if step.swaps is not None]
    assert len(swaps.out_host_pages) == 4 * 3
    assert swaps.in_host_pages == swaps.out_host_pages
    assert engine.scheduler.stats().preempted_tokens == 0
    for request in requests:
        engine.check_alone(request)
    engine.check_empty()
