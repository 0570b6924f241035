"""Random operations on the scheduler against an executor that reads its pages back."""

from __future__ import annotations

from typing import Literal

import msgspec
from collected_outputs import Collected
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_inputs import executor_ready, make_request
from scheduler_simulation import Engine
from simulated_tokens import run_alone

from ringserve.config import SchedulerConfig
from ringserve.messages.columns import pack_i32
from ringserve.messages.requests import ALL_CHOICES, ResumedChoice, ServiceTargets, TokenizedRequest
from ringserve.messages.sessions import SessionRef


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come and go at any time; results are late by up to two steps."""

    engine: Engine

    @initialize(
        tight=st.sampled_from([True, True, False]),
        page_size=st.sampled_from([4, 16, 2, 64]),
        num_pages=st.sampled_from([6, 10, 16, 20, 2, 1]),
        max_num_seqs=st.sampled_from([4, 8, 2, 1]),
        budget=st.sampled_from([16, 5, 48, 2, 1]),
        max_model_len=st.sampled_from([60, 200, 30, 8]),
        max_steps_in_flight=st.sampled_from([2, 2, 1, 3]),
        prefix_caching=st.sampled_from([True, True, True, False]),
        policy=st.sampled_from(["fcfs", "priority", "deadline", "fair"]),
        aging=st.sampled_from([0, 1e-8]),
        reservation=st.sampled_from(["prompt", "prompt", "sequence"]),
        resume_steps=st.sampled_from([32, 0, 3]),
        patience=st.sampled_from([0.0, 0.0, 2e-8]),
        target_itl_ms=st.sampled_from([0.0, 1e-6]),
        num_host_pages=st.sampled_from([40, 40, 12, 3, 0]),
        swap_bytes_per_second=st.sampled_from([1e30, 1e30, 3e12]),
        session_share=st.sampled_from([0.5, 1.0, 0.1]),
    )
    def start(
        self,
        tight: bool,
        page_size: int,
        num_pages: int,
        max_num_seqs: int,
        budget: int,
        max_model_len: int,
        max_steps_in_flight: int,
        prefix_caching: bool,
        policy: Literal["fcfs", "priority", "deadline", "fair"],
        aging: float,
        reservation: Literal["prompt", "sequence"],
        resume_steps: int,
        patience: float,
        target_itl_ms: float,
        num_host_pages: int,
        swap_bytes_per_second: float,
        session_share: float,
    ) -> None:
        if tight:  # slots and budget enough, pages not
            page_size, num_pages, max_num_seqs, budget = 4, 10 + num_pages % 8, 4 + max_num_seqs, 8 + budget
        limits = (page_size, num_pages, max_num_seqs, budget, max_model_len)
        ready = executor_ready(*limits, num_host_pages, swap_bytes_per_second)
        config = SchedulerConfig(
            enable_prefix_caching=prefix_caching,
            scheduling_policy=policy,
            priority_aging=aging,
            tenant_weights="a=3",
            default_deadline=1e-7,
            kv_reservation=reservation,
            preemption_resume_steps=resume_steps,
            queue_timeout=patience,
            target_itl_ms=target_itl_ms,
            session_pool_share=session_share,
            session_ttl=1e-6,
        )
        self.engine = Engine(ready, max_steps_in_flight, config)
        self.requests: dict[int, TokenizedRequest] = {}
        self.aborted: set[tuple[int, int]] = set()
        self.failing: set[tuple[int, int]] = set()

    @rule(
        prompt_fraction=st.floats(0, 1),
        max_tokens=st.integers(0, 60),
        n=st.integers(1, 3),
        ignore_eos=st.booleans(),
        stop_token_ids=st.sampled_from([(), (3,), (3, 4, 5, 6)]),
        min_tokens=st.integers(0, 12),
        logprobs=st.integers(-1, 2),
        prompt_logprobs=st.integers(-1, 0),
        resumed_fractions=st.lists(st.floats(0, 1) | st.none(), max_size=3),
        fails=st.integers(0, 30),
        family=st.sampled_from([0, 0, 1]),
        shared_fraction=st.sampled_from([0.0, 0.4, 0.9, 1.0]),
        cache_salt=st.sampled_from(["", "", "a"]),
        priority=st.sampled_from([0, 0, 1, -1, 5]),
        tenant=st.sampled_from(["", "a", "b"]),
        due_in=st.sampled_from([0, 0, 5, 50, 10**6]),
        session=st.sampled_from([None, None, "talk", "chat"]),
        goes_on=st.booleans(),
    )
    def add(
        self,
        prompt_fraction: float,
        max_tokens: int,
        n: int,
        ignore_eos: bool,
        stop_token_ids: tuple[int, ...],
        min_tokens: int,
        logprobs: int,
        prompt_logprobs: int,
        resumed_fractions: list[float | None],
        fails: int,
        family: int,
        shared_fraction: float,
        cache_salt: str,
        priority: int,
        tenant: str,
        due_in: int,
        session: str | None,
        goes_on: bool,
    ) -> None:
        request_id = len(self.requests) + (1 << 48)
        # Mostly short ones, so that several run and grow; some that cannot fit.
        num_prompt_tokens = 1 + int(prompt_fraction**3 * self.engine.max_model_len)
        ref = SessionRef("key", session) if session is not None else None
        said = self.said(ref) if goes_on else b""

        def build(resumed: tuple[ResumedChoice, ...]) -> TokenizedRequest:
            request = make_request(
                request_id,
                num_prompt_tokens,
                max_tokens,
                n=n,
                ignore_eos=ignore_eos,
                stop_token_ids=stop_token_ids,
                min_tokens=min_tokens,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                resumed=resumed,
                family=family,
                num_shared_tokens=int(shared_fraction * num_prompt_tokens),
                cache_salt=cache_salt,
                priority=priority,
                tenant=tenant,
                targets=ServiceTargets(self.engine.now_ns + due_in if due_in else 0),
            )
            return msgspec.structs.replace(request, prompt_token_ids=said + request.prompt_token_ids, session=ref)

        request = build(())
        length = len(request.prompt_token_ids) // 4
        resumed = []
        if length < self.engine.max_model_len:
            for choice, fraction in enumerate(resumed_fractions[:n]):
                tokens, reason, _ = run_alone(request, choice, self.engine.max_model_len)
                if fraction is None:
                    finish = "stop" if reason == "stop" else "length"
                    resumed.append(ResumedChoice(choice, pack_i32(tokens), 0, finish))  # type: ignore[arg-type]
                else:
                    resumed.append(ResumedChoice(choice, pack_i32(tokens[: int(fraction * len(tokens))]), 0))
        request = build(tuple(resumed))
        refused = self.engine.add(request)
        assert (refused is not None) == (length >= self.engine.max_model_len)
        if refused is None:
            self.requests[request_id] = request
            if fails < 3:
                self.engine.executor.fail_at[request.sampling.seed, 0] = fails
                self.failing.add((request_id, 0))

    def said(self, ref: SessionRef | None) -> bytes:
        """What the latest turn of a session that is over has come to."""
        for request in reversed(self.requests.values()):
            first = self.engine.choices.get((request.request_id, 0))
            if ref is not None and request.session == ref and first is not None and first.finishes:
                before = b"".join(choice.token_ids for choice in request.resumed if choice.choice == 0)
                return request.prompt_token_ids + before + pack_i32(first.tokens)
        return b""

    @rule(session=st.sampled_from(["talk", "chat"]))
    def drop_session(self, session: str) -> None:
        self.engine.scheduler.drop_session(SessionRef("key", session), self.engine.now_ns)

    @rule(size=st.integers(2, 6), num_prompt_tokens=st.integers(1, 12), max_tokens=st.integers(20, 60))
    def crowd(self, size: int, num_prompt_tokens: int, max_tokens: int) -> None:
        """Short prompts with long answers: they are admitted together and then outgrow the pool."""
        request_id = len(self.requests) + (1 << 48)
        request = make_request(request_id, num_prompt_tokens, max_tokens, n=size, prompt_logprobs=0)
        if self.engine.add(request) is None:
            self.requests[request_id] = request

    @rule(which=st.integers(0, 8), choice=st.integers(-1, 2), stop=st.booleans())
    def abort(self, which: int, choice: int, stop: bool) -> None:
        """Of any request: waiting, running, preempted, over or never heard of; mostly the latest."""
        self.abort_checked((1 << 48) + max(0, len(self.requests) + 1 - which), choice, stop)

    @rule(data=st.data(), stop=st.booleans())
    def abort_live(self, data: st.DataObject, stop: bool) -> None:
        """Of a choice that is not over."""
        live = [
            (request.request_id, choice)
            for request in self.requests.values()
            for choice in range(request.n)
            if (found := self.engine.choices.get((request.request_id, choice))) is None or not found.finishes
        ]
        if live:
            self.abort_checked(*data.draw(st.sampled_from(live)), stop)

    def abort_checked(self, request_id: int, choice: int, stop: bool) -> None:
        before = {key for key, collected in self.engine.choices.items() if collected.finishes}
        self.engine.abort(request_id, choice, "stop" if stop else "abort")
        for key, collected in self.engine.choices.items():
            if collected.finishes and key not in before:
                assert key[0] == request_id
                assert choice in (ALL_CHOICES, key[1])
                assert collected.finishes[0].reason == ("stop" if stop else "abort")
                self.aborted.add(key)

    @rule()
    def schedule(self) -> None:
        self.engine.schedule()

    @precondition(lambda self: self.engine.in_flight)
    @rule(times=st.integers(1, 2))
    def deliver(self, times: int) -> None:
        for _ in range(times):
            self.engine.deliver()

    @rule(times=st.integers(1, 12))
    def steps(self, times: int) -> None:
        """As the loop does it."""
        for _ in range(times):
            while self.engine.schedule() is not None:
                pass
            self.engine.deliver()

    @invariant()
    def one_end_each(self) -> None:
        if hasattr(self, "engine"):
            assert all(len(collected.finishes) <= 1 for collected in self.engine.choices.values())

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.run()
        self.engine.check_empty()
        if not self.aborted and not self.failing:  # else some of what was lost is never asked for again
            assert self.engine.scheduler.stats().preempted_tokens == self.engine.executor.recomputed_tokens
        late = {refused.request_id for refused in self.engine.refusals}
        for request in self.requests.values():
            if request.request_id in late:
                assert not any(key[0] == request.request_id for key in self.engine.choices)
                continue
            entered = {choice.choice: choice for choice in request.resumed}
            for choice in range(request.n):
                key = (request.request_id, choice)
                if choice in entered and entered[choice].finish_reason is not None:
                    assert key not in self.engine.choices
                    continue
                self.check_choice(request, choice, self.engine.choices[key], entered.get(choice))
        self.check_prompt_logprobs()

    def check_choice(
        self, request: TokenizedRequest, choice: int, collected: Collected, resumed: ResumedChoice | None
    ) -> None:
        key = (request.request_id, choice)
        assert len(collected.starts) == 1
        assert len(collected.finishes) == 1
        tokens, reason, stop_token_id = run_alone(request, choice, self.engine.max_model_len)
        tokens = tokens[len(resumed.token_ids) // 4 :] if resumed is not None else tokens
        if key in self.aborted or collected.finishes[0].reason == "error":
            assert key in self.aborted or key in self.failing
            assert collected.tokens == tokens[: len(collected.tokens)]
        else:
            assert collected.end == (tokens, reason, stop_token_id)
        if request.sampling.logprobs >= 0:
            assert [entry[0] for entry in collected.logprobs if entry is not None] == collected.tokens
        else:
            assert collected.logprobs == [None] * len(collected.tokens)

    def check_prompt_logprobs(self) -> None:
        """Ascending, each position once, and all of them where the choice got as far as a token."""
        positions: dict[int, list[int]] = {}
        for chunk in self.engine.prompt_logprobs:
            positions.setdefault(chunk.request_id, []).extend(
                range(chunk.start, chunk.start + len(chunk.columns.counts) // 4)
            )
        for request_id, seen in positions.items():
            assert self.requests[request_id].sampling.prompt_logprobs >= 0
            assert seen == list(range(len(seen)))
        for request_id, request in self.requests.items():
            first = self.engine.choices.get((request_id, 0))
            if request.sampling.prompt_logprobs >= 0 and first is not None and first.tokens:
                assert len(positions[request_id]) == len(request.prompt_token_ids) // 4


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=160,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
