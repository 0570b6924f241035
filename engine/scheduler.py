"""Who advances by how many tokens in the next step: the engine's policy, with two verbs and no I/O.

``schedule()`` plans a step, ``update_from_output()`` takes a step's result. Every running sequence catches its
computed tokens up with the tokens it knows; chunked prefill, decode and recompute after preemption are all that one
rule. Up to ``max_steps_in_flight`` steps are planned before their results are back: a sequence that reaches its last
known token is assumed to yield one more, which the executor feeds to itself.

Who comes first is the policy's business (``policy.py``). A step takes the running sequences in its order, those that
decode before those in the middle of a prompt, then admits from the head of the queue. The victim of preemption is the
last in that order; the first is never preempted: something always advances.

Results are matched with the records of the steps as planned, never by slot alone, so the late result of a sequence
that has ended meanwhile is not credited to the one that has its slot now.

This module knows no clock, no ring, no text and no model.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

from ringserve.config import SchedulerConfig
from ringserve.engine import scheduler_integrity as integrity
from ringserve.engine.admission import why_refused
from ringserve.engine.kv_manager import KVManager
from ringserve.engine.output_collector import OutputCollector
from ringserve.engine.policy import make_policy
from ringserve.engine.prefix_sharing import PrefixSharing
from ringserve.engine.scheduler_outputs import (
    LogprobEntry,
    OutputBatch,
    split_logprobs,
)
from ringserve.engine.scheduler_step import PlannedRow, StepPlan, StepRecord, StepResult
from ringserve.engine.sequence import Request, Sequence, SequenceStatus
from ringserve.messages import (
    ALL_CHOICES,
    EngineStats,
    ExecutorReady,
    FinishReason,
    ModelRunnerOutput,
    NewSequence,
    RequestRefused,
    SchedulerOutput,
    SequenceFinish,
    StepTimes,
    TokenizedRequest,
    pack_i32,
    unpack_i32,
)


class Scheduler:
    """Queues, policy and page accounting of one executor."""

    def __init__(
        self, ready: ExecutorReady, config: SchedulerConfig | None = None, max_steps_in_flight: int = 2
    ) -> None:
        config = config if config is not None else SchedulerConfig()
        if ready.max_num_seqs < 1 or ready.max_num_batched_tokens < 1 or max_steps_in_flight < 1:
            raise ValueError("a scheduler needs at least one slot, one token per step and one step in flight")
        self._kv = KVManager(ready.num_pages, ready.page_size)
        self._prefixes = PrefixSharing(self._kv, config.enable_prefix_caching)
        self._max_num_seqs = ready.max_num_seqs
        self._max_num_batched_tokens = ready.max_num_batched_tokens
        self._max_steps_in_flight = max_steps_in_flight
        # A sequence alone must always fit, or it could never advance.
        self._max_model_len = min(ready.max_model_len, self._kv.capacity)
        self._eos_token_ids = frozenset(unpack_i32(ready.eos_token_ids))
        self._requests: dict[int, Request] = {}
        self._waiting = make_policy(config)
        self._running: dict[Sequence, None] = {}
        self._free_slots = list(range(ready.max_num_seqs - 1, -1, -1))
        self._freed_slots: list[int] = []
        self._in_flight: deque[StepRecord] = deque()
        self._outputs = OutputCollector()
        self._next_step_id = 0
        self._next_arrival = 0
        self._num_preemptions = 0
        self._preempted_tokens = 0
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
        return len(self._free_slots)

    def has_request(self, request_id: int) -> bool:
        return request_id in self._requests

    def add_request(self, message: TokenizedRequest, now_ns: int) -> RequestRefused | None:
        """Queue a request, or say why it can never be computed.

        A choice that enters at its end (``resumed``) is finished at once: ``take_outputs`` has its row.
        """
        refused = why_refused(message, self._max_model_len, known=message.request_id in self._requests)
        if refused is not None:
            return refused
        request = Request.of(message, self._max_model_len, now_ns)
        resumed = {choice.choice: choice for choice in message.resumed}
        for choice in range(message.n):
            sequence = Sequence(request, choice, arrival=self._next_arrival)
            if choice in resumed:
                if resumed[choice].finish_reason is not None:
                    continue
                sequence.output_token_ids.frombytes(resumed[choice].token_ids)
            self._next_arrival += 1
            request.live[choice] = sequence
            self._waiting.add(sequence)
        if request.live:
            self._requests[request.request_id] = request
        for sequence in list(request.live.values()):
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

    # ---------------------------------------------------------------------------------------------- schedule

    def schedule(self, now_ns: int) -> SchedulerOutput | None:
        """Plan the next step; None if there is nothing to compute now or enough steps are in flight."""
        if len(self._in_flight) >= self._max_steps_in_flight:
            return None
        plan = StepPlan(self._max_num_batched_tokens)
        in_prompt = []
        for sequence in self._waiting.in_order(self._running):
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # preempted for an earlier one in this loop
            if sequence.num_schedulable_tokens > 1:
                in_prompt.append(sequence)
            else:
                self._plan_running(sequence, plan)
        for sequence in in_prompt:
            self._admit(plan, sequence)
            if sequence.status is SequenceStatus.RUNNING:
                self._plan_running(sequence, plan)
        self._admit(plan, None)
        return self._commit(plan, now_ns) if plan.num_tokens else None

    def _plan_running(self, sequence: Sequence, plan: StepPlan) -> None:
        num_tokens = min(sequence.num_schedulable_tokens, plan.budget)
        if num_tokens == 0:
            return
        while (pages := self._kv.grow(sequence.block_table, sequence.num_computed_tokens + num_tokens)) is None:
            victim = self._waiting.in_order(self._running)[-1]
            self._preempt(victim, plan)
            if victim is sequence:
                return
        plan.add(sequence, num_tokens, pages)

    def _preempt(self, victim: Sequence, plan: StepPlan) -> None:
        """Throw a sequence's keys and values away; it is computed again from its tokens, later.

        Tokens that steps in flight draw for it are kept when they arrive, so it is not sent again before that.
        """
        self._num_preemptions += 1
        self._preempted_tokens += victim.num_computed_tokens
        victim.num_preemptions += 1
        plan.remove(victim)
        self._leave_executor(victim)
        self._waiting.add(victim)

    def _admit(self, plan: StepPlan, before: Sequence | None) -> None:
        """Start sequences from the head of the queue; a head that has to wait lets no later one pass.

        With ``before``, a running sequence, only those that the policy serves before it.

        All pages of the tokens known so far are taken at once, so that a prompt once begun is never stuck half-way.
        Every running sequence will soon want another page: unless nothing runs, one for each stays free, or the
        newcomer would be preempted again at once (and a victim admitted again in the step that threw it out).
        What the prefix cache has is not computed again.
        """
        while plan.budget > 0 and (sequence := self._waiting.head()) is not None:
            if before is not None and not self._waiting.precedes(sequence, before):
                return
            if sequence.num_pending_tokens:
                return
            cached = self._prefixes.lookup(sequence)
            if cached is None or not self._make_room(sequence, cached, plan):
                return
            self._waiting.remove(sequence)
            self._start(sequence, cached, plan)

    def _make_room(self, sequence: Sequence, cached: list[int], plan: StepPlan) -> bool:
        """See that there are a slot and pages for a waiting sequence, at the expense of those that it displaces."""
        victims = None
        while True:
            num_new_pages = self._kv.pages_for(sequence.num_known_tokens) - len(cached) + self._kv.num_idle(cached)
            headroom = len(self._running) + 1 if self._running else 0
            missing = num_new_pages + headroom - self._kv.num_free_pages
            if self._free_slots and missing <= 0:
                return True
            if victims is None:
                order = self._waiting.in_order(self._running)
                victims = [running for running in order if self._waiting.displaces(sequence, running)]
                # Each one that goes frees its own pages (if nobody shares them) and the page that was kept for it.
                if missing > sum(len(victim.block_table) + 1 for victim in victims):
                    return False
            if not victims:
                return False
            self._preempt(victims.pop(), plan)

    def _start(self, sequence: Sequence, cached: list[int], plan: StepPlan) -> None:
        num_known_tokens = sequence.num_known_tokens
        self._kv.share(cached)
        sequence.block_table.extend(cached)
        new = self._kv.grow(sequence.block_table, num_known_tokens)
        if new is None:
            raise AssertionError("pages that were counted as free are not")
        self._prefixes.start(sequence, cached)
        if not sequence.first_scheduled_ns:
            self._waiting.charge(sequence, sequence.request.num_prompt_tokens - sequence.num_cached_tokens, 0)
        self._running[sequence] = None
        sequence.status = SequenceStatus.RUNNING
        sequence.slot = self._free_slots.pop()
        plan.admitted[sequence] = sequence.num_computed_tokens
        plan.add(sequence, min(num_known_tokens - sequence.num_computed_tokens, plan.budget), cached + new)

    def _commit(self, plan: StepPlan, now_ns: int) -> SchedulerOutput:
        rows = []
        for sequence, num_tokens in plan.num_tokens.items():
            sequence.num_computed_tokens += num_tokens
            self._prefixes.register(sequence)
            samples = sequence.num_computed_tokens == sequence.num_known_tokens
            rows.append(PlannedRow(sequence, sequence.slot, num_tokens, samples))
        new_sequences = []
        for sequence, num_cached_tokens in plan.admitted.items():
            request = sequence.request
            sequence.first_scheduled_ns = sequence.first_scheduled_ns or now_ns
            new_sequences.append(
                NewSequence(
                    slot=sequence.slot,
                    token_ids=request.prompt_token_ids + sequence.output_token_ids.tobytes(),
                    num_prompt_tokens=request.num_prompt_tokens,
                    num_computed_tokens=num_cached_tokens,
                    choice=sequence.choice,
                    sampling=sequence.sampling,
                    max_tokens=min(request.max_tokens, request.max_total_tokens - request.num_prompt_tokens),
                )
            )
        for row in rows:
            row.sequence.num_pending_tokens += row.samples
        record = StepRecord(self._next_step_id, now_ns, tuple(rows), sum(row.num_tokens for row in rows))
        self._next_step_id += 1
        self._in_flight.append(record)
        freed_slots, self._freed_slots = self._freed_slots, []
        return SchedulerOutput(
            step_id=record.step_id,
            new_sequences=tuple(new_sequences),
            slots=pack_i32(row.slot for row in rows),
            num_tokens=pack_i32(row.num_tokens for row in rows),
            new_page_counts=pack_i32(len(plan.new_pages[row.sequence]) for row in rows),
            new_pages=pack_i32(page for row in rows for page in plan.new_pages[row.sequence]),
            freed_slots=pack_i32(freed_slots),
            sent_ns=now_ns,
        )

    # ------------------------------------------------------------------------------------ update_from_output

    def update_from_output(self, output: ModelRunnerOutput, now_ns: int) -> StepResult:
        """Take the result of the oldest step in flight; raises ValueError for any other step's."""
        if not self._in_flight or self._in_flight[0].step_id != output.step_id:
            expected = self._in_flight[0].step_id if self._in_flight else "none"
            raise ValueError(f"the executor answered step {output.step_id}; the oldest in flight is {expected}")
        record = self._in_flight.popleft()
        self._num_steps += 1
        self._num_computed_tokens += record.num_tokens
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
        times = StepTimes(
            step_id=record.step_id,
            scheduled_ns=record.scheduled_ns,
            executor_received_ns=output.received_ns,
            executor_started_ns=output.started_ns,
            executor_finished_ns=output.sent_ns,
            result_received_ns=now_ns,
            num_tokens=record.num_tokens,
            num_sequences=len(record.rows),
        )
        request_ids = frozenset(row.sequence.request.request_id for row in record.rows)
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
            self._leave_executor(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        request = sequence.request
        del request.live[sequence.choice]
        if not request.live:
            del self._requests[request.request_id]
        finish = SequenceFinish(-1, reason, stop_token_id, sequence.num_preemptions, message)
        self._outputs.add(sequence, token_ids, logprobs, finish)

    def _leave_executor(self, sequence: Sequence) -> None:
        """Give slot and pages back. The executor hears of the slot with the next step."""
        del self._running[sequence]
        self._prefixes.register(sequence)
        self._prefixes.leave(sequence)
        self._kv.release(sequence.block_table)
        self._freed_slots.append(sequence.slot)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1
        sequence.num_computed_tokens = 0
        sequence.status = SequenceStatus.WAITING

    # ----------------------------------------------------------------------------------------------- looking

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_free_pages=self._kv.num_free_pages,
            num_pages=self._kv.num_pages,
            num_preemptions=self._num_preemptions,
            preempted_tokens=self._preempted_tokens,
            num_steps=self._num_steps,
            num_computed_tokens=self._num_computed_tokens,
            num_prefix_queries=self._prefixes.num_queries,
            num_prefix_hits=self._prefixes.num_hits,
        )

    def check_integrity(self) -> list[str]:
        """What is wrong with the books; empty when sound. Takes time that grows with everything held."""
        running, waiting = self._running, self._waiting
        return [
            *self._kv.check_integrity(sequence.block_table for sequence in running),
            *self._prefixes.check_integrity(running),
            *integrity.check_running(running, self._kv.page_size),
            *integrity.check_waiting(waiting),
            *integrity.check_slots(running, self._free_slots, self._max_num_seqs),
            *integrity.check_queues(running, waiting, self._requests),
            *waiting.check_integrity(running),
            *integrity.check_in_flight([*running, *waiting], self._in_flight, self._max_steps_in_flight),
        ]
