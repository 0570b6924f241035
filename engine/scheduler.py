"""Who advances by how many tokens in the next step: the engine's policy, with two verbs and no I/O.

``schedule()`` plans a step, ``update_from_output()`` takes a step's result. Every running sequence catches its
computed tokens up with the tokens it knows; chunked prefill, decode and recompute after preemption are all that one
rule. Up to ``max_steps_in_flight`` steps are planned before their results are back: a sequence that reaches its last
known token is assumed to yield one more, which the executor feeds to itself.

The parts: ``policy.py`` (who comes first), ``step_planner.py`` (rows of a step, preemption), ``residents.py`` (slots
and pages), ``admission.py`` and ``wait_prediction.py`` (refusals), ``step_time.py`` (how long steps take). Here is a
request's life between them.

Results are matched with the records of the steps as planned, never by slot alone, so the late result of a sequence
that has ended meanwhile is not credited to the one that has its slot now.

This module knows no clock, no ring, no text and no model.
"""

from __future__ import annotations

from collections import deque
from dataclasses import astuple
from typing import Literal

from ringserve.config import SchedulerConfig
from ringserve.engine import scheduler_integrity as integrity
from ringserve.engine.admission import Admission, why_impossible
from ringserve.engine.executor_times import ExecutorTimes
from ringserve.engine.kv_manager import KVManager
from ringserve.engine.output_collector import OutputCollector
from ringserve.engine.policy import make_policy
from ringserve.engine.prefix_sharing import PrefixSharing
from ringserve.engine.residents import Residents
from ringserve.engine.scheduler_outputs import LogprobEntry, OutputBatch, split_logprobs
from ringserve.engine.scheduler_step import PlannedRow, StepPlan, StepRecord, StepResult
from ringserve.engine.sequence import Request, Sequence, SequenceStatus
from ringserve.engine.sessions import Sessions
from ringserve.engine.step_message import step_message
from ringserve.engine.step_planner import StepPlanner
from ringserve.engine.step_time import StepShape, StepTimeModel
from ringserve.engine.token_budget import TokenBudget
from ringserve.engine.wait_prediction import Prediction, WaitPredictor
from ringserve.messages import (
    ALL_CHOICES,
    EngineStats,
    ExecutorReady,
    FinishReason,
    ModelRunnerOutput,
    RequestRefused,
    SchedulerOutput,
    SequenceFinish,
    SessionInfo,
    SessionRef,
    StepTimes,
    TokenizedRequest,
    unpack_i32,
)

_SWEEP_INTERVAL_NS = 20_000_000
"""How often the queue is searched for requests that have waited too long."""


class Scheduler:
    """Queues, policy and page accounting of one executor."""

    def __init__(
        self,
        ready: ExecutorReady,
        config: SchedulerConfig | None = None,
        max_steps_in_flight: int = 2,
        step_times: StepTimeModel | None = None,
    ) -> None:
        config = config if config is not None else SchedulerConfig()
        if ready.max_num_seqs < 1 or ready.max_num_batched_tokens < 1 or max_steps_in_flight < 1:
            raise ValueError("a scheduler needs at least one slot, one token per step and one step in flight")
        self._kv = KVManager(ready.num_pages, ready.page_size)
        self._sessions = Sessions(self._kv, config)
        self._prefixes = PrefixSharing(self._kv, config.enable_prefix_caching, self._sessions)
        self._residents = Residents(self._kv, self._prefixes, ready.max_num_seqs)
        self._running = self._residents.running
        self._waiting = make_policy(config)
        self._step_times = step_times if step_times is not None else StepTimeModel()
        budget = TokenBudget(ready.max_num_batched_tokens, config.target_itl_ms * 1e-3, self._step_times)
        self._planner = StepPlanner(self._residents, self._waiting, budget, config)
        self._admission = Admission(config)
        self._predictor = WaitPredictor(
            self._step_times, ready.max_num_seqs, ready.max_num_batched_tokens, self._kv.capacity
        )
        self._executor_times = ExecutorTimes()
        self._max_num_seqs = ready.max_num_seqs
        self._max_steps_in_flight = max_steps_in_flight
        # A sequence alone must always fit, or it could never advance.
        self._max_model_len = min(ready.max_model_len, self._kv.capacity)
        self._eos_token_ids = frozenset(unpack_i32(ready.eos_token_ids))
        self._requests: dict[int, Request] = {}
        self._num_impatient = 0
        """Live requests that may be refused for having waited."""
        self._next_sweep_ns = 0
        self._now_ns = 0
        """As of the last call that had a time: an abort has none."""
        self._refusals: list[RequestRefused] = []
        self._in_flight: deque[StepRecord] = deque()
        self._outputs = OutputCollector()
        self._next_step_id = 0
        self._next_arrival = 0
        self._num_steps = 0
        self._num_computed_tokens = 0

    # ---------------------------------------------------------------------------------------------- requests

    @property
    def has_work(self) -> bool:
        """Some sequence is not over."""
        return bool(self._running) or len(self._waiting) > 0

    @property
    def num_steps_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def num_free_slots(self) -> int:
        return len(self._residents.free_slots)

    @property
    def num_preemptions(self) -> int:
        return self._planner.num_preemptions

    @property
    def step_times(self) -> StepTimeModel:
        """How long steps take, as far as they were measured."""
        return self._step_times

    def has_request(self, request_id: int) -> bool:
        return request_id in self._requests

    def add_request(self, message: TokenizedRequest, now_ns: int) -> RequestRefused | None:
        """Queue a request, or say why it can never be computed, or not in time.

        A choice that enters at its end (``resumed``) is finished at once: ``take_outputs`` has its row.
        """
        refused = why_impossible(message, self._max_model_len, known=message.request_id in self._requests)
        if refused is not None:
            return refused
        request = Request.of(message, self._max_model_len, now_ns)
        resumed = {choice.choice: choice for choice in message.resumed}
        sequences: list[Sequence] = []
        for choice in range(message.n):
            sequence = Sequence(request, choice, arrival=self._next_arrival + len(sequences))
            if choice in resumed:
                if resumed[choice].finish_reason is not None:
                    continue
                sequence.output_token_ids.frombytes(resumed[choice].token_ids)
            sequences.append(sequence)
        if sequences and not message.resumed:  # what the server has begun it finishes
            refused = self._why_refused(sequences[0], now_ns)
            if refused is not None:
                return refused
        self._next_arrival += len(sequences)
        for sequence in sequences:
            request.live[sequence.choice] = sequence
            self._waiting.add(sequence)
        if request.live:
            self._now_ns = now_ns
            if request.session is not None:
                self._sessions.touch(request.session, now_ns)
            self._requests[request.request_id] = request
            self._num_impatient += self._is_impatient(request)
        for sequence in sequences:
            if sequence.output_token_ids:
                self._append(sequence, (), ())
        return None

    def abort(self, request_id: int, choice: int = ALL_CHOICES, reason: Literal["abort", "stop"] = "abort") -> None:
        """End a request's live choices, or one; unknown or finished: no-op. ``take_outputs`` has their rows."""
        request = self._requests.get(request_id)
        if request is None:
            return
        for sequence in list(request.live.values()):
            if choice in (ALL_CHOICES, sequence.choice):
                self._finish(sequence, (), (), reason)

    def take_outputs(self) -> OutputBatch:
        """Rows that came of ``add_request`` and ``abort`` since the last result."""
        return self._outputs.take()

    def take_refusals(self) -> list[RequestRefused]:
        """Requests that were queued and have been refused since the last call: they waited too long."""
        refusals, self._refusals = self._refusals, []
        return refusals

    def _why_refused(self, sequence: Sequence, now_ns: int) -> RequestRefused | None:
        request, admission = sequence.request, self._admission
        reason = admission.why_too_many(request, self._waiting)
        prediction = None
        if reason is not None or admission.wants_prediction(request):
            prediction = self._predict(sequence)
        if reason is None and prediction is not None:
            reason = admission.why_too_late(request, prediction, now_ns)
        if reason is None:
            reason = admission.why_overdue(request, now_ns)
        if reason is None:
            return None
        return admission.refusal(request.request_id, reason, prediction.wait if prediction is not None else None)

    def _predict(self, sequence: Sequence) -> Prediction | None:
        cached = self._prefixes.lookup(sequence) or []
        num_cached = self._prefixes.num_cached(sequence, cached)
        ahead = self._waiting.ahead_of(sequence)
        return self._predictor.predict(sequence.request, self._running, ahead, num_cached)

    def _is_impatient(self, request: Request) -> bool:
        return not request.is_resumed and (self._admission.has_timeout or request.has_deadline)

    def _refuse_overdue(self, now_ns: int) -> None:
        """Give up requests that wait in vain, before anything is computed for them."""
        if not self._num_impatient or now_ns < self._next_sweep_ns:
            return
        self._next_sweep_ns = now_ns + _SWEEP_INTERVAL_NS
        for request in {sequence.request for sequence in self._waiting}:
            if not self._is_impatient(request) or not request.is_untouched:
                continue
            reason = self._admission.why_overdue(request, now_ns)
            soonest = self._predictor.predict(request, (), ()) if reason is None and request.has_deadline else None
            if soonest is not None:  # even if everybody else were gone
                reason = self._admission.why_too_late(request, soonest, now_ns)
            if reason is not None:
                prediction = self._predict(next(iter(request.live.values())))
                wait = prediction.wait if prediction is not None else None
                self._refusals.append(self._admission.refusal(request.request_id, reason, wait))
                for sequence in list(request.live.values()):
                    self._waiting.remove(sequence)
                    self._end(sequence)

    # ---------------------------------------------------------------------------------------------- schedule

    def schedule(self, now_ns: int) -> SchedulerOutput | None:
        """Plan the next step; None if there is nothing to compute now or enough steps are in flight."""
        if len(self._in_flight) >= self._max_steps_in_flight:
            return None
        self._now_ns = now_ns
        self._sessions.expire(now_ns)
        self._refuse_overdue(now_ns)
        plan = self._planner.plan()
        return self._commit(plan, now_ns) if plan.num_tokens else None

    def _commit(self, plan: StepPlan, now_ns: int) -> SchedulerOutput:
        rows, spans = [], []
        register = self._prefixes.register
        for sequence, num_tokens in plan.num_tokens.items():
            num_computed = sequence.num_computed_tokens
            spans.append((num_computed, num_tokens))
            sequence.num_computed_tokens = num_computed = num_computed + num_tokens
            register(sequence)
            samples = num_computed == sequence.num_known_tokens
            rows.append(PlannedRow(sequence, sequence.slot, num_tokens, samples))
        for sequence in plan.admitted:
            sequence.first_scheduled_ns = sequence.first_scheduled_ns or now_ns
        step_id = self._next_step_id
        self._next_step_id += 1
        message = step_message(step_id, plan, rows, self._residents.take_freed_slots(), now_ns)
        for row in rows:
            row.sequence.num_pending_tokens += row.samples
        self._in_flight.append(StepRecord(step_id, now_ns, tuple(rows), StepShape.of(spans)))
        return message

    # ------------------------------------------------------------------------------------ update_from_output

    def update_from_output(self, output: ModelRunnerOutput, now_ns: int) -> StepResult:
        """Take the result of the oldest step in flight; raises ValueError for any other step's."""
        if not self._in_flight or self._in_flight[0].step_id != output.step_id:
            expected = self._in_flight[0].step_id if self._in_flight else "none"
            raise ValueError(f"the executor answered step {output.step_id}; the oldest in flight is {expected}")
        record = self._in_flight.popleft()
        self._now_ns = now_ns
        self._num_steps += 1
        self._num_computed_tokens += record.shape.num_tokens
        self._step_times.observe(record.shape, self._executor_times.on_result(output))
        if output.prompt_logprobs:
            by_slot = {row.slot: row for row in record.rows}
            for chunk in output.prompt_logprobs:
                self._outputs.add_prompt_logprobs(by_slot[chunk.slot].sequence, chunk.start, chunk.columns)
        tokens = dict(zip(unpack_i32(output.slots), unpack_i32(output.token_ids), strict=True))
        logprobs: dict[int, LogprobEntry] = {}
        if output.logprobs is not None:
            logprobs = dict(zip(tokens, split_logprobs(output.logprobs), strict=True))
        failures = dict(output.failed_slots)
        for row in record.rows:
            sequence = row.sequence
            if row.samples:
                sequence.num_pending_tokens -= 1
            if sequence.status is SequenceStatus.FINISHED:
                continue
            if row.slot in failures:
                self._finish(sequence, (), (), "error", message=failures[row.slot])
            elif not row.samples:
                continue
            elif sequence.request.max_tokens == 0:
                self._finish(sequence, (), (), "length")
            elif row.slot not in tokens:
                self._finish(sequence, (), (), "error", message="The executor returned no token for this sequence.")
            else:
                entry = logprobs.get(row.slot)
                self._append(sequence, (tokens[row.slot],), (entry,) if entry is not None and entry.count else ())
        self._executor_times.on_planned(self.has_work)
        times = StepTimes(
            step_id=record.step_id,
            scheduled_ns=record.scheduled_ns,
            executor_received_ns=output.received_ns,
            executor_started_ns=output.started_ns,
            executor_finished_ns=output.sent_ns,
            result_received_ns=now_ns,
            num_tokens=record.shape.num_tokens,
            num_sequences=len(record.rows),
        )
        request_ids = frozenset([row.sequence.request.request_id for row in record.rows])
        return StepResult(self.take_outputs(), times, request_ids)

    def _append(self, sequence: Sequence, token_ids: tuple[int, ...], logprobs: tuple[LogprobEntry, ...]) -> None:
        """Add tokens and end the sequence if its last one is the end. With no tokens: was it over when it came?"""
        sequence.output_token_ids.extend(token_ids)
        self._waiting.charge(sequence, 0, len(token_ids))
        request = sequence.request
        num_output_tokens = len(sequence.output_token_ids)
        last = sequence.output_token_ids[-1]
        # The executor masks these before min_tokens; they must not end it here either.
        if num_output_tokens > request.sampling.min_tokens:
            if last in self._eos_token_ids and not request.sampling.ignore_eos:
                self._finish(sequence, token_ids, logprobs, "stop")
                return
            if last in request.stop_token_ids:
                self._finish(sequence, token_ids, logprobs, "stop", stop_token_id=last)
                return
        if (
            num_output_tokens >= request.max_tokens
            or request.num_prompt_tokens + num_output_tokens >= request.max_total_tokens
        ):
            self._finish(sequence, token_ids, logprobs, "length")
        elif token_ids:
            self._outputs.add(sequence, token_ids, logprobs, None)

    def _finish(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        logprobs: tuple[LogprobEntry, ...],
        reason: FinishReason,
        stop_token_id: int | None = None,
        message: str = "",
    ) -> None:
        if sequence.status is SequenceStatus.RUNNING:
            if sequence.request.session is not None and reason != "error":
                self._prefixes.register(sequence)
                self._sessions.keep(sequence, self._now_ns)
            self._residents.leave(sequence)
        else:
            self._waiting.remove(sequence)
        if reason in ("stop", "length"):
            self._predictor.on_finish(len(sequence.output_token_ids))
        self._end(sequence)
        finish = SequenceFinish(-1, reason, stop_token_id, sequence.num_preemptions, message)
        self._outputs.add(sequence, token_ids, logprobs, finish)

    def _end(self, sequence: Sequence) -> None:
        """It holds nothing and waits no more: forget it, and its request with the last choice."""
        sequence.status = SequenceStatus.FINISHED
        request = sequence.request
        del request.live[sequence.choice]
        if not request.live:
            del self._requests[request.request_id]
            self._num_impatient -= self._is_impatient(request)

    # ---------------------------------------------------------------------------------------------- sessions

    def list_sessions(self, owner: str, now_ns: int) -> tuple[SessionInfo, ...]:
        """The sessions of one owner that are kept now."""
        self._sessions.expire(now_ns)
        return self._sessions.of_owner(owner, now_ns)

    def drop_session(self, session: SessionRef, now_ns: int) -> bool:
        """Keep its pages no longer; False if there is no such session."""
        self._sessions.expire(now_ns)
        return self._sessions.drop(session)

    # ----------------------------------------------------------------------------------------------- looking

    def stats(self) -> EngineStats:
        model = self._step_times
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_free_pages=self._kv.num_free_pages,
            num_pages=self._kv.num_pages,
            num_preemptions=self._planner.num_preemptions,
            preempted_tokens=self._planner.num_tokens_lost,
            num_steps=self._num_steps,
            num_computed_tokens=self._num_computed_tokens,
            num_prefix_queries=self._prefixes.num_queries,
            num_prefix_hits=self._prefixes.num_hits,
            executor_busy_ns=self._executor_times.busy_ns,
            executor_idle_ns=self._executor_times.idle_ns,
            num_sessions=len(self._sessions),
            step_costs=astuple(model.costs) if model.is_fitted else (),
        )

    def check_integrity(self) -> list[str]:
        """What is wrong with the books; empty when sound. Takes time that grows with everything held."""
        running, waiting = self._running, self._waiting
        return [
            *self._kv.check_integrity(sequence.block_table for sequence in running),
            *self._prefixes.check_integrity(running),
            *self._sessions.check_integrity(),
            *integrity.check_running(running, self._kv.page_size),
            *integrity.check_waiting(waiting),
            *integrity.check_slots(running, self._residents.free_slots, self._max_num_seqs),
            *integrity.check_queues(running, waiting, self._requests),
            *waiting.check_integrity(running),
            *integrity.check_in_flight([*running, *waiting], self._in_flight, self._max_steps_in_flight),
        ]
