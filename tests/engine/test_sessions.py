"""Conversations keep their pages: what a next turn computes, who may use them, and what becomes of them."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from scheduler_inputs import executor_ready, make_request
from scheduler_simulation import Engine

from ringserve.config import SchedulerConfig
from ringserve.messages.columns import pack_i32
from ringserve.messages.requests import TokenizedRequest
from ringserve.messages.sessions import SessionInfo, SessionRef

SECOND = 1_000_000_000
ME = SessionRef("key-1", "talk")


class Talks:
    """An engine, and what was said in its conversations."""

    def __init__(self, num_pages: int = 64, page_size: int = 16, config: SchedulerConfig | None = None) -> None:
        ready = executor_ready(page_size, num_pages, max_num_seqs=4, max_model_len=400)
        self.engine = Engine(ready, config=config)
        self.requests: dict[int, TokenizedRequest] = {}
        self.said: dict[SessionRef | None, bytes] = {}
        self.computed = 0

    def turn(
        self,
        num_new_tokens: int = 10,
        max_tokens: int = 7,
        session: SessionRef | None = ME,
        n: int = 1,
        cache_salt: str = "",
        said: bytes | None = None,
    ) -> TokenizedRequest:
        """A next request of a conversation: all that was said, and new tokens. Not run yet."""
        request_id = len(self.requests)
        request = make_request(request_id, num_new_tokens, max_tokens, n=n, cache_salt=cache_salt)
        before = self.said.get(session, b"") if said is None else said
        request = msgspec.structs.replace(request, prompt_token_ids=before + request.prompt_token_ids, session=session)
        self.requests[request_id] = request
        assert self.engine.add(request) is None
        return request

    def run(self) -> int:
        """Until nothing is left; returns the tokens that were computed for it."""
        self.engine.run()
        for request_id, request in self.requests.items():
            self.engine.check_alone(request)
            answer = pack_i32(self.engine.choices[request_id, 0].tokens)
            self.said[request.session] = request.prompt_token_ids + answer
        before, self.computed = self.computed, self.engine.executor.computed_tokens
        return self.computed - before

    def kept(self, owner: str = "key-1") -> list[SessionInfo]:
        return list(self.engine.scheduler.list_sessions(owner, self.engine.now_ns))


@pytest.mark.parametrize("num_new_tokens", [1, 5, 6, 16, 23, 40])
@pytest.mark.parametrize("first", [1, 9, 10, 25, 100])
def test_a_next_turn_computes_only_its_new_tokens(first: int, num_new_tokens: int) -> None:
    """The answer's last token was never computed: it is new as well."""
    talks = Talks()
    talks.turn(first, 7)
    assert talks.run() == first + 6
    for _ in range(3):
        talks.turn(num_new_tokens, 7)
        assert talks.run() == 1 + num_new_tokens + 6
    (info,) = talks.kept()
    assert info.num_tokens == len(talks.said[ME]) // 4 - 1
    assert info.num_pages == -(-info.num_tokens // 16)
    talks.engine.check_empty()


def test_without_a_session_what_is_not_a_full_page_is_computed_again() -> None:
    talks = Talks()
    talks.turn(10, 7, session=None)
    talks.run()
    talks.turn(10, 7, session=None)
    assert talks.run() == 10 + 7 + 10 + 6 - 16
    assert talks.kept("") == []


def test_another_beginning_computes_what_is_different() -> None:
    talks = Talks()
    talks.turn(20, 7)
    talks.run()
    talks.turn(30, 7, said=b"")
    assert talks.run() == 30 + 6
    (info,) = talks.kept()  # the last turn is what the next is expected to go on from
    assert info.num_tokens == 36


def test_the_last_token_is_computed_even_if_all_are_kept() -> None:
    talks = Talks()
    request = talks.turn(20, 7)
    talks.run()
    kept = talks.said[ME][: 4 * 26]
    again = msgspec.structs.replace(request, request_id=1, prompt_token_ids=kept)
    talks.requests[1] = again
    assert talks.engine.add(again) is None
    assert talks.run() == 26 - 16 + 6


def test_a_salt_keeps_even_the_same_session_apart() -> None:
    talks = Talks()
    talks.turn(5, 4)
    talks.run()
    talks.turn(5, 4, cache_salt="other")
    assert talks.run() == 5 + 4 + 5 + 3


def test_turns_at_the_same_time_are_both_right() -> None:
    talks = Talks()
    talks.turn(20, 7)
    talks.run()
    for _ in range(2):
        talks.turn(10, 7)
    computed = talks.run()
    assert computed == (1 + 10 + 6) + (27 - 16 + 10 + 6)  # one of them took the page that is not full
    talks.engine.check_empty()


def test_choices_share_a_session() -> None:
    talks = Talks()
    talks.turn(20, 7)
    talks.run()
    talks.turn(10, 7, n=3)
    talks.run()
    assert len(talks.kept()) == 1
    talks.engine.check_empty()


def test_a_session_ends_with_its_time() -> None:
    talks = Talks(config=SchedulerConfig(session_ttl=5.0))
    talks.turn(20, 7)
    talks.run()
    talks.engine.now_ns += 4 * SECOND
    (info,) = talks.kept()
    assert info.idle_ns // SECOND == info.age_ns // SECOND == 4
    assert 0 < info.expires_in_ns <= SECOND
    talks.turn(3, 1)
    talks.run()
    talks.engine.now_ns += 4 * SECOND  # counted from the last use
    (info,) = talks.kept()
    assert info.age_ns // SECOND == 8
    talks.engine.now_ns += 2 * SECOND
    assert talks.kept() == []
    assert talks.engine.scheduler.stats().num_sessions == 0
    assert talks.engine.scheduler.check_integrity() == []
    talks.turn(5, 7)
    assert talks.run() == len(talks.said[ME]) // 4 - 1 - 16  # the full page is still there


def test_a_session_is_its_owners() -> None:
    talks = Talks()
    mine, other = ME, SessionRef("key-2", "talk")
    talks.turn(5, 4, session=mine)
    talks.run()
    talks.turn(5, 4, session=other, said=talks.said[mine])
    assert talks.run() == 5 + 4 + 5 + 3  # less than a page: nothing that others could have
    assert [info.num_tokens for info in talks.kept("key-2")] == [5 + 4 + 5 + 3]
    assert [info.num_tokens for info in talks.kept("key-1")] == [5 + 3]
    assert talks.kept("") == []
    scheduler, now_ns = talks.engine.scheduler, talks.engine.now_ns
    assert not scheduler.drop_session(SessionRef("key-3", "talk"), now_ns)
    assert scheduler.drop_session(mine, now_ns)
    assert not scheduler.drop_session(mine, now_ns)
    assert talks.kept("key-1") == []
    assert len(talks.kept("key-2")) == 1
    assert scheduler.check_integrity() == []


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_what_was_dropped_does_not_come_back(first: bool, num_steps: int) -> None:
    """Turns that came before it was dropped, waiting or running, bring nothing back; a later one begins anew."""
    talks = Talks()
    if not first:
        talks.turn(20, 7)
        talks.run()
    talks.turn(10, 7, n=2)
    for _ in range(num_steps):
        talks.engine.schedule()
        talks.engine.deliver()
    scheduler = talks.engine.scheduler
    assert scheduler.drop_session(ME, talks.engine.now_ns)
    assert not scheduler.drop_session(ME, talks.engine.now_ns)
    talks.run()
    assert talks.kept() == []
    talks.turn(5, 7)
    talks.run()
    assert len(talks.kept()) == 1
    talks.engine.check_empty()


def test_sessions_keep_no_more_than_their_share() -> None:
    talks = Talks(num_pages=40, config=SchedulerConfig(session_pool_share=0.25))
    for number in range(6):
        talks.turn(40, 7, session=SessionRef("", f"talk {number}"))  # three pages each
        talks.run()
    assert [info.session_id for info in talks.kept("")] == ["talk 3", "talk 4", "talk 5"]
    talks.turn(300, 7, session=SessionRef("", "long"))
    talks.run()
    (info,) = talks.kept("")
    assert (info.session_id, info.num_pages, info.num_tokens) == ("long", 10, 160)


def test_pages_that_sessions_share_count_once() -> None:
    talks = Talks(num_pages=40, config=SchedulerConfig(session_pool_share=0.25))
    talks.turn(85, 2, session=None)
    talks.run()
    prompt = talks.said[None][: 4 * 80]  # five full pages
    for number in range(6):
        talks.turn(3, 4, session=SessionRef("", f"talk {number}"), said=prompt)
        talks.run()
    assert [info.session_id for info in talks.kept("")] == [f"talk {number}" for number in (1, 2, 3, 4, 5)]
    assert all(info.num_tokens == 80 + 3 + 3 for info in talks.kept(""))


@pytest.mark.parametrize(
    "config",
    [
        SchedulerConfig(session_ttl=0.0),
        SchedulerConfig(session_pool_share=0.0),
        SchedulerConfig(enable_prefix_caching=False),
    ],
)
def test_sessions_that_are_off_keep_nothing(config: SchedulerConfig) -> None:
    talks = Talks(config=config)
    talks.turn(20, 7)
    talks.run()
    talks.turn(5, 7)
    talks.run()
    assert talks.kept() == []
    assert talks.engine.scheduler.stats().num_sessions == 0


def test_kept_pages_outlive_other_traffic() -> None:
    """Requests that come and go use up all pages many times; a session's are touched only when there are no others."""
    talks = Talks(num_pages=24)
    talks.turn(60, 7)
    talks.run()
    for _ in range(20):
        talks.turn(100, 7, session=None, said=b"")
        talks.run()
    talks.turn(5, 7)
    assert talks.run() == 1 + 5 + 6


def test_pressure_takes_kept_pages_before_anybody_is_preempted() -> None:
    talks = Talks(num_pages=24, config=SchedulerConfig(session_pool_share=1.0))
    for number in range(4):
        talks.turn(60, 30, session=SessionRef("", f"talk {number}"))
        talks.run()
    assert talks.engine.scheduler.stats().num_sessions == 4
    for _ in range(3):
        talks.turn(60, 60, session=None, said=b"")  # 8 pages each: the whole pool
    talks.run()
    assert talks.engine.scheduler.stats().num_preemptions == 0
    assert sum(info.num_pages for info in talks.kept("")) == 0
    talks.turn(5, 7, session=SessionRef("", "talk 3"))  # what was lost is computed again
    assert talks.run() == 90 + 5 + 6


def test_an_aborted_turn_keeps_what_it_has_computed() -> None:
    talks = Talks()
    engine, request = talks.engine, talks.turn(20, 50)
    while (0, 0) not in engine.choices or len(engine.choices[0, 0].tokens) < 5:
        engine.schedule()
        engine.deliver()
    engine.abort(0)
    del talks.requests[0]
    engine.run()
    (info,) = talks.kept()
    assert info.num_tokens in (24, 25)  # the last token, too, where a step in flight computes it
    said = request.prompt_token_ids + pack_i32(engine.choices[0, 0].tokens)
    talks.requests[-1] = request  # ids go on
    before = engine.executor.computed_tokens
    talks.turn(5, 3, said=said)
    engine.run()
    assert engine.executor.computed_tokens - before == 25 - info.num_tokens + 5 + 2


class SessionMachine(RuleBasedStateMachine):
    """Conversations, other traffic, aborts, drops and passing time, on pools that are too small."""

    talks: Talks

    @initialize(
        page_size=st.sampled_from([4, 16, 2]),
        num_pages=st.sampled_from([16, 24, 40]),
        share=st.sampled_from([0.5, 1.0, 0.1]),
        steps=st.sampled_from([2, 1]),
        num_host_pages=st.sampled_from([0, 50, 6]),
    )
    def start(self, page_size: int, num_pages: int, share: float, steps: int, num_host_pages: int) -> None:
        self.talks = Talks(num_pages, page_size, SchedulerConfig(session_ttl=9.0, session_pool_share=share))
        self.talks.engine = Engine(
            executor_ready(page_size, num_pages, 4, 32, 200, num_host_pages),
            steps,
            SchedulerConfig(session_ttl=9.0, session_pool_share=share),
        )
        self.aborted: set[int] = set()

    @rule(
        number=st.sampled_from([0, 0, 1, 2, None]),
        num_new_tokens=st.integers(1, 30),
        max_tokens=st.integers(1, 20),
        n=st.sampled_from([1, 1, 2]),
        salt=st.sampled_from(["", "", "", "a"]),
        anew=st.booleans(),
    )
    def ask(self, number: int | None, num_new_tokens: int, max_tokens: int, n: int, salt: str, anew: bool) -> None:
        session = None if number is None else SessionRef("", f"talk {number}")
        said = b"" if anew else self.talks.said.get(session, b"")
        limit = self.talks.engine.max_model_len - 60
        if len(said) // 4 + num_new_tokens > limit:
            said = b""
        if num_new_tokens > limit:
            return
        self.talks.turn(num_new_tokens, max_tokens, session, n, salt, said)

    @rule(how_many=st.integers(1, 8))
    def steps(self, how_many: int) -> None:
        engine = self.talks.engine
        for _ in range(how_many):
            engine.schedule()
            engine.deliver()
        for request_id, request in self.talks.requests.items():
            choice = engine.choices.get((request_id, 0))
            if choice is not None and choice.finishes:
                self.talks.said[request.session] = request.prompt_token_ids + pack_i32(choice.tokens)

    @rule(which=st.integers(1, 4))
    def abort(self, which: int) -> None:
        request_id = len(self.talks.requests) - which
        if request_id >= 0:
            self.aborted.add(request_id)
            self.talks.engine.abort(request_id)

    @rule(number=st.integers(0, 2))
    def drop(self, number: int) -> None:
        engine = self.talks.engine
        ref = SessionRef("", f"talk {number}")
        known = {info.session_id for info in self.talks.kept("")}
        under_way = {request.session for request in engine.scheduler._book.requests.values()}
        found = engine.scheduler.drop_session(ref, engine.now_ns)
        assert found == (ref.session_id in known or ref in under_way)
        assert not engine.scheduler.drop_session(ref, engine.now_ns)

    @rule(seconds=st.integers(1, 6))
    def wait(self, seconds: int) -> None:
        self.talks.engine.now_ns += seconds * SECOND

    @invariant()
    def books_are_sound(self) -> None:
        if hasattr(self, "talks"):
            assert self.talks.engine.scheduler.check_integrity() == []
            for info in self.talks.kept(""):
                assert 0 < info.expires_in_ns <= 9 * SECOND

    def teardown(self) -> None:
        if not hasattr(self, "talks"):
            return
        engine = self.talks.engine
        engine.run()
        for request_id, request in self.talks.requests.items():
            if request_id not in self.aborted:
                engine.check_alone(request)
        engine.check_empty()


TestSessionMachine = SessionMachine.TestCase
TestSessionMachine.settings = settings(
    max_examples=120, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
