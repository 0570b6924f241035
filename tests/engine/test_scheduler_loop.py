"""The scheduler's actor, with neighbours in memory."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from collected_outputs import Collected, collect
from fake_executor import FakeExecutor
from scheduler_inputs import executor_ready, make_request
from simulated_tokens import run_alone

from ringserve.actor import ActorContext, BlockingActor
from ringserve.config import SchedulerConfig, SchedulerSettings
from ringserve.engine import scheduler_loop
from ringserve.messages.columns import pack_i32
from ringserve.messages.integrity import CheckIntegrity, IntegrityReport
from ringserve.messages.requests import Abort, RequestRefused, ResumedChoice
from ringserve.messages.sessions import DropSession, ListSessions, SessionDropped, SessionList, SessionRef
from ringserve.messages.startup import ExecutorReady, LoadProgress, Started, SupervisorInbound
from ringserve.messages.steps import ModelRunnerOutput, SchedulerOutput
from ringserve.messages.token_outputs import TokenOutputs


class Inbox:
    """A neighbour's ring: what was sent to it."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, message: Any) -> None:
        self.messages.append(message)

    def take(self) -> list[Any]:
        messages, self.messages = self.messages, []
        return messages


class Bench:
    """The actor between two tokenizers and an executor that answers when told to."""

    def __init__(self) -> None:
        self.inboxes = {"tokenizer-0": Inbox(), "tokenizer-1": Inbox(), "executor": Inbox()}
        self.reports: list[SupervisorInbound] = []
        self.actor: BlockingActor = scheduler_loop.create(
            ActorContext(
                role="scheduler",
                settings=SchedulerSettings(config=SchedulerConfig()),
                outboxes=self.inboxes,
                report=self.reports.append,
                flush_soon=lambda: None,
            )
        )
        self.actor.startup()
        self.executor: FakeExecutor | None = None
        self.steps: list[SchedulerOutput] = []
        self.choices: dict[tuple[int, int], Collected] = {}
        self.outputs: dict[str, list[TokenOutputs]] = {"tokenizer-0": [], "tokenizer-1": []}

    def ready(self, ready: ExecutorReady) -> None:
        self.executor = FakeExecutor(ready)
        self.turn((ready, "executor"))

    def turn(self, *messages: tuple[Any, str]) -> None:
        """One turn of the loop: a batch, act, flush."""
        for message, source in messages:
            self.actor.handle(message, source)
        assert self.actor.act() is False
        self.steps += self.inboxes["executor"].take()

    def result(self) -> ModelRunnerOutput:
        """The executor's answer to the oldest step."""
        assert self.executor is not None
        return self.executor.execute(self.steps.pop(0))

    def read(self) -> None:
        """Let the tokenizers read; anything but tokens, after the executor's announcement, fails."""
        for role, outputs in self.outputs.items():
            for message in self.inboxes[role].take():
                if isinstance(message, ExecutorReady):
                    continue
                assert isinstance(message, TokenOutputs)
                outputs.append(message)
                collect(message, self.choices)

    def run(self) -> None:
        while self.steps:
            self.turn((self.result(), "executor"))
        self.read()

    def integrity(self) -> IntegrityReport:
        self.turn((CheckIntegrity(99, 3), "tokenizer-0"))
        (report,) = (m for m in self.inboxes["tokenizer-0"].take() if isinstance(m, IntegrityReport))
        return report


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_it_reports_that_it_started(bench: Bench) -> None:
    assert bench.reports == [Started({})]


def test_requests_before_the_executor_is_ready_are_refused(bench: Bench) -> None:
    bench.turn((make_request(1, 5, 5), "tokenizer-1"), (Abort(1), "tokenizer-1"))
    (refused,) = bench.inboxes["tokenizer-1"].take()
    assert isinstance(refused, RequestRefused)
    assert (refused.request_id, refused.status) == (1, 503)
    assert refused.retry_after is not None
    assert refused.retry_after > 0
    assert bench.inboxes["tokenizer-0"].take() == []
    assert bench.integrity() == IntegrityReport(99, (), 0, 0, 0, 3, 0)


def test_sessions_are_listed_and_dropped_for_who_asks(bench: Bench) -> None:
    ref = SessionRef("key-1", "talk")
    bench.turn((ListSessions(7, "key-1"), "tokenizer-1"), (DropSession(8, ref), "tokenizer-1"))
    assert bench.inboxes["tokenizer-1"].take() == [SessionList(7, ()), SessionDropped(8, False)]
    bench.ready(executor_ready())
    bench.turn((msgspec.structs.replace(make_request(1, 20, 5), session=ref), "tokenizer-0"))
    bench.run()
    bench.turn((ListSessions(9, "key-2"), "tokenizer-0"), (ListSessions(10, "key-1"), "tokenizer-1"))
    assert bench.inboxes["tokenizer-0"].take()[-1] == SessionList(9, ())
    (listed,) = bench.inboxes["tokenizer-1"].take()
    assert (listed.request_id, [info.num_tokens for info in listed.sessions]) == (10, [24])
    bench.turn((DropSession(11, ref), "tokenizer-1"))
    assert bench.inboxes["tokenizer-1"].take()[0] == SessionDropped(11, True)
    assert bench.integrity().problems == ()


def test_progress_and_ready_go_to_every_tokenizer(bench: Bench) -> None:
    bench.turn((LoadProgress("load", 0.5), "executor"))
    ready = executor_ready()
    bench.ready(ready)
    for role in ("tokenizer-0", "tokenizer-1"):
        progress, forwarded, outputs = bench.inboxes[role].take()
        assert progress == LoadProgress("load", 0.5)
        assert forwarded == ready
        assert outputs.stats.num_free_pages == ready.num_pages
        assert outputs.token_counts == b""


def test_answers_go_where_the_request_came_from(bench: Bench) -> None:
    bench.ready(executor_ready())
    for role in ("tokenizer-0", "tokenizer-1"):
        bench.inboxes[role].take()
    first, second = make_request(1, 5, 4, n=2), make_request(2, 7, 8)
    bench.turn((first, "tokenizer-0"), (second, "tokenizer-1"))
    bench.run()
    for request in (first, second):
        for choice in range(request.n):
            assert bench.choices[request.request_id, choice].end == run_alone(request, choice, 512)
    for role, request in (("tokenizer-0", first), ("tokenizer-1", second)):
        alone: dict[tuple[int, int], Collected] = {}
        for message in bench.outputs[role]:
            collect(message, alone)
        assert alone.keys() == {(request.request_id, choice) for choice in range(request.n)}
    report = bench.integrity()
    assert report.problems == ()
    assert report.num_free_pages == report.num_pages
    assert (report.scheduler_requests, report.tokenizer_requests, report.num_free_slots) == (0, 3, 8)


def test_two_steps_are_in_the_executors_ring(bench: Bench) -> None:
    bench.ready(executor_ready())
    bench.turn((make_request(1, 5, 10), "tokenizer-0"))
    assert [step.step_id for step in bench.steps] == [0, 1]
    bench.turn()
    assert len(bench.steps) == 2
    bench.turn((bench.result(), "executor"))
    assert [step.step_id for step in bench.steps] == [1, 2]


def test_each_result_gives_one_message_with_its_times(bench: Bench) -> None:
    bench.ready(executor_ready(max_num_batched_tokens=16))
    bench.inboxes["tokenizer-0"].take()
    bench.turn((make_request(1, 20, 5), "tokenizer-0"))
    assert bench.inboxes["tokenizer-0"].take() == []
    scheduled_ns = bench.steps[0].sent_ns
    bench.turn((bench.result(), "executor"))
    (message,) = bench.inboxes["tokenizer-0"].take()  # a chunk of the prompt: no row, but its times
    assert message.token_counts == b""
    assert message.times.step_id == 0
    assert message.times.scheduled_ns == scheduled_ns
    assert (message.times.num_tokens, message.times.num_sequences) == (16, 1)
    assert scheduled_ns <= message.times.result_received_ns <= message.sent_ns
    bench.turn((bench.result(), "executor"))
    (message,) = bench.inboxes["tokenizer-0"].take()
    assert message.token_counts == pack_i32([1])
    assert message.stats.num_running == 1
    assert message.stats.num_steps == 2


def test_fresh_numbers_come_before_it_idles_and_only_once(bench: Bench) -> None:
    bench.ready(executor_ready())
    bench.turn((make_request(1, 5, 3, ignore_eos=True), "tokenizer-0"))
    bench.run()
    assert bench.outputs["tokenizer-0"][-1].stats.num_running == 0
    assert bench.outputs["tokenizer-1"][-1].stats == bench.outputs["tokenizer-0"][-1].stats
    bench.turn()
    bench.turn()
    assert bench.inboxes["tokenizer-0"].take() == bench.inboxes["tokenizer-1"].take() == []


def test_an_abort_is_answered_in_the_same_turn(bench: Bench) -> None:
    bench.ready(executor_ready())
    bench.turn((make_request(1, 5, 300, n=2), "tokenizer-0"))
    bench.read()
    bench.turn((Abort(1, 1, "stop"), "tokenizer-0"))
    bench.read()
    assert bench.choices[1, 1].finishes[0].reason == "stop"
    bench.turn((Abort(1), "tokenizer-0"), (Abort(1), "tokenizer-0"), (Abort(5), "tokenizer-1"))
    bench.read()
    assert bench.choices[1, 0].finishes[0].reason == "abort"
    assert len(bench.steps) == 2
    bench.run()
    report = bench.integrity()
    assert report.problems == ()
    assert report.num_free_pages == report.num_pages


def test_a_result_and_an_abort_in_one_batch(bench: Bench) -> None:
    bench.ready(executor_ready())
    bench.turn((make_request(1, 5, 300), "tokenizer-0"))
    result = bench.result()
    bench.turn((Abort(1), "tokenizer-0"), (result, "executor"))
    bench.run()
    assert [finish.reason for finish in bench.choices[1, 0].finishes] == ["abort"]
    assert bench.choices[1, 0].tokens == []


def test_a_refusal_goes_back(bench: Bench) -> None:
    bench.ready(executor_ready(max_model_len=16))
    bench.inboxes["tokenizer-1"].take()
    bench.turn((make_request(1, 16, 5), "tokenizer-1"))
    (refused,) = bench.inboxes["tokenizer-1"].take()
    assert isinstance(refused, RequestRefused)
    assert refused.status == 400
    assert bench.steps == []


def test_requests_that_enter_at_their_end(bench: Bench) -> None:
    bench.ready(executor_ready())
    over = ResumedChoice(0, pack_i32([5, 6]), 3, "stop")
    at_length = ResumedChoice(0, pack_i32([5, 6]), 3)
    bench.turn((make_request(1, 5, 2, resumed=(over,)), "tokenizer-0"))
    for role in ("tokenizer-0", "tokenizer-1"):
        bench.inboxes[role].take()
    bench.turn((make_request(2, 5, 2, resumed=(at_length,)), "tokenizer-1"))
    bench.read()
    assert bench.choices.keys() == {(2, 0)}
    assert bench.choices[2, 0].end == ([], "length", None)
    assert bench.integrity().problems == ()


def test_prompt_logprobs_reach_the_right_tokenizer(bench: Bench) -> None:
    bench.ready(executor_ready(max_num_batched_tokens=16))
    bench.inboxes["tokenizer-1"].take()
    bench.turn((make_request(1, 40, 2, prompt_logprobs=0), "tokenizer-1"))
    bench.run()
    starts = [chunk.start for message in bench.outputs["tokenizer-1"] for chunk in message.prompt_logprobs]
    assert starts == [0, 17, 33]


def test_the_executor_speaks_out_of_turn(bench: Bench) -> None:
    result = ModelRunnerOutput(0, b"", b"", None, (), 0, 0, 0)
    with pytest.raises(ValueError, match="before it was ready"):
        bench.actor.handle(result, "executor")
    bench.ready(executor_ready())
    with pytest.raises(ValueError, match="ready twice"):
        bench.actor.handle(executor_ready(), "executor")


def test_shutdown_in_the_middle(bench: Bench) -> None:
    bench.ready(executor_ready())
    bench.turn((make_request(1, 5, 300), "tokenizer-0"))
    bench.actor.shutdown()


def test_who_waits_too_long_is_told_by_its_tokenizer() -> None:
    """The refusal goes the way the request came, and its route ends with it."""
    now = [1000]
    inboxes = {"tokenizer-0": Inbox(), "tokenizer-1": Inbox(), "executor": Inbox()}
    settings = SchedulerSettings(config=SchedulerConfig(queue_timeout=1.0))
    context = ActorContext("scheduler", settings, inboxes, lambda message: None, lambda: None)
    actor = scheduler_loop.SchedulerActor(context, clock=lambda: now[0])
    ready = executor_ready(max_num_seqs=1)
    executor = FakeExecutor(ready)
    actor.handle(ready, "executor")
    actor.handle(make_request(1, 5, 50), "tokenizer-0")
    actor.handle(make_request(2, 5, 5), "tokenizer-1")
    actor.act()
    now[0] += 2 * 10**9
    for step in inboxes["executor"].take():
        actor.handle(executor.execute(step), "executor")
    actor.act()
    (refused,) = [message for message in inboxes["tokenizer-1"].take() if isinstance(message, RequestRefused)]
    assert (refused.request_id, refused.status, refused.code) == (2, 503, "queue_timeout")
    actor.handle(CheckIntegrity(9), "tokenizer-0")
    (report,) = [message for message in inboxes["tokenizer-0"].take() if isinstance(message, IntegrityReport)]
    assert report.problems == ()
    assert report.scheduler_requests == 1
    actor.handle(Abort(2), "tokenizer-1")  # crossed the refusal on its way
    actor.act()
