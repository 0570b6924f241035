"""Who advances by how many tokens in the next step: the engine's policy, with two verbs and no I/O.

``schedule()`` plans a step, ``update_from_output()`` takes a step's result. Every running sequence catches its
computed tokens up with the tokens it knows; chunked prefill, decode and recompute after preemption are all that one
rule. Up to ``max_steps_in_flight`` steps are planned before their results are back: a sequence that reaches its last
known token is assumed to yield one more, which the executor feeds to itself.

The parts: ``gate.py`` (who may wait), ``policy.py`` (who comes first), ``step_planner.py`` (a step's rows, preemption),
``residents.py`` (slots and pages), ``request_book.py`` (a request from entry to end), ``step_time.py`` (how long steps
take).

Results are matched with the records of the steps as planned, never by slot alone, so the late result of a sequence
that has ended meanwhile is not credited to the one that has its slot now.

This module knows no clock, no ring, no text and no model.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import Literal

from ringserve.config import SchedulerConfig
from ringserve.engine import scheduler_integrity as integrity
from ringserve.engine.admission import why_impossible
from ringserve.engine.executor_times import ExecutorTimes
from ringserve.engine.gate import Gate
from ringserve.engine.kv_manager import KVManager
from ringserve.engine.policy import make_policy
from ringserve.engine.prefix_sharing import PrefixSharing
from ringserve.engine.request_book import RequestBook
from ringserve.engine.residents import Residents
from ringserve.engine.scheduler_outputs import OutputBatch
from ringserve.engine.scheduler_step import StepPlan, StepRecord, StepResult
from ringserve.engine.sequence import Request, Sequence
from ringserve.engine.sessions import Sessions
from ringserve.engine.step_booking import book_step
from ringserve.engine.step_message import step_message
from ringserve.engine.step_planner import StepPlanner
from ringserve.engine.step_time import StepTimeModel
from ringserve.engine.swap_space import SwapCosts, SwapSpace
from ringserve.engine.swapping import Swapping
from ringserve.engine.token_budget import TokenBudget
from ringserve.engine.wait_prediction import WaitPredictor
from ringserve.messages.columns import unpack_i32
from ringserve.messages.requests import ALL_CHOICES, RequestRefused, TokenizedRequest
from ringserve.messages.sessions import SessionInfo, SessionRef
from ringserve.messages.startup import ExecutorReady
from ringserve.messages.stats import EngineStats, StepTimes
from ringserve.messages.steps import ModelRunnerOutput, SchedulerOutput


class Scheduler:
    """Queues, policy and page accounting of one executor."""

    def __init__(
        self,
        ready: ExecutorReady,
        config: SchedulerConfig | None = None,
        max_steps_in_flight: int = 2,
        step_times: StepTimeModel | None = None,
        swap_costs: SwapCosts | None = None,
    ) -> None:
        config = config if config is not None else SchedulerConfig()
        if ready.max_num_seqs < 1 or ready.max_num_batched_tokens < 1 or max_steps_in_flight < 1:
            raise ValueError("a scheduler needs at least one slot, one token per step and one step in flight")
        self._kv = KVManager(ready.num_pages, ready.page_size)
        self._sessions = Sessions(self._kv, config)
        self._prefixes = PrefixSharing(self._kv, config.enable_prefix_caching, self._sessions)
        self._step_times = step_times if step_times is not None else StepTimeModel()
        if swap_costs is None:
            swap_costs = SwapCosts(ready.bytes_per_page, ready.swap_bytes_per_second)
        self._swaps = Swapping(SwapSpace(ready.num_host_pages), swap_costs, ready.page_size, self._step_times)
        self._residents = Residents(self._kv, self._prefixes, self._swaps, ready.max_num_seqs)
        self._running = self._residents.running
        self._waiting = make_policy(config)
        budget = TokenBudget(ready.max_num_batched_tokens, config.target_itl_ms * 1e-3, self._step_times)
        self._planner = StepPlanner(self._residents, self._waiting, budget, config)
        predictor = WaitPredictor(self._step_times, ready.max_num_seqs, ready.max_num_batched_tokens, self._kv.capacity)
        self._gate = Gate(config, self._residents, self._waiting, predictor)
        self._eos_token_ids = frozenset(unpack_i32(ready.eos_token_ids))
        self._book = RequestBook(self._residents, self._waiting, predictor, self._eos_token_ids)
        self._executor_times = ExecutorTimes()
        self._max_num_seqs = ready.max_num_seqs
        self._max_steps_in_flight = max_steps_in_flight
        # A sequence alone must always fit, or it could never advance.
        self._max_model_len = min(ready.max_model_len, self._kv.capacity)
        self._refusals: list[RequestRefused] = []
        self._in_flight: deque[StepRecord] = deque()
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
        return len(self._book.requests)

    @property
    def num_free_slots(self) -> int:
        return len(self._residents.free_slots)

    @property
    def num_preemptions(self) -> int:
        return self._planner.num_preemptions

    @property
    def num_resumptions(self) -> int:
        """Of preempted sequences; only then is it known how many tokens the preemption has cost."""
        return self._planner.num_resumptions

    @property
    def step_times(self) -> StepTimeModel:
        """How long steps take, as far as they were measured."""
        return self._step_times

    def has_request(self, request_id: int) -> bool:
        return request_id in self._book.requests

    def add_request(self, message: TokenizedRequest, now_ns: int) -> RequestRefused | None:
        """Queue a request, or say why it can never be computed, or not in time.

        A choice that enters at its end (``resumed``) is finished at once: ``take_outputs`` has its row.
        """
        refused = why_impossible(message, self._max_model_len, known=message.request_id in self._book.requests)
        if refused is not None:
            return refused
        request = Request.of(message, self._max_model_len, self._eos_token_ids, now_ns)
        resumed = {choice.choice: choice for choice in message.resumed}
        sequences: list[Sequence] = []
        for choice in range(message.n):
            output_token_ids = array("i")
            if choice in resumed:
                if resumed[choice].finish_reason is not None:
                    continue
                output_token_ids.frombytes(resumed[choice].token_ids)
            arrival = self._next_arrival + len(sequences)
            sequences.append(Sequence(request, choice, arrival, output_token_ids=output_token_ids))
        if sequences and not message.resumed:  # what the server has begun it finishes
            refused = self._gate.why_refused(sequences[0], now_ns)
            if refused is not None:
                return refused
        self._next_arrival += len(sequences)
        self._sessions.set_time(now_ns)
        if request.session is not None:
            self._sessions.touch(request.session)
        self._book.enter(request, sequences)
        return None

    def abort(self, request_id: int, choice: int = ALL_CHOICES, reason: Literal["abort", "stop"] = "abort") -> None:
        """End a request's live choices, or one; unknown or finished: no-op. ``take_outputs`` has their rows."""
        request = self._book.requests.get(request_id)
        if request is None:
            return
        for sequence in list(request.live.values()):
            if choice in (ALL_CHOICES, sequence.choice):
                self._book.finish(sequence, (), (), reason)

    def take_outputs(self) -> OutputBatch:
        """Rows that came of ``add_request`` and ``abort`` since the last result."""
        return self._book.outputs.take()

    def take_refusals(self) -> list[RequestRefused]:
        """Requests that were queued and have been refused since the last call: they waited too long."""
        refusals, self._refusals = self._refusals, []
        return refusals

    # ---------------------------------------------------------------------------------------------- schedule

    def schedule(self, now_ns: int) -> SchedulerOutput | None:
        """Plan the next step; None if there is nothing to compute now or enough steps are in flight."""
        if len(self._in_flight) >= self._max_steps_in_flight:
            return None
        self._sessions.set_time(now_ns)
        for request, refused in self._gate.overdue(now_ns):
            self._book.drop(request)
            self._refusals.append(refused)
        plan = self._planner.plan()
        return self._commit(plan, now_ns) if plan.num_tokens else None

    def _commit(self, plan: StepPlan, now_ns: int) -> SchedulerOutput:
        swaps = self._swaps.take()
        has_swaps = swaps is not None
        record = book_step(plan, self._next_step_id, now_ns, self._kv.page_size, self._prefixes, has_swaps)
        for sequence in plan.admitted:
            sequence.first_scheduled_ns = sequence.first_scheduled_ns or now_ns
        message = step_message(record, plan, self._residents.take_freed_slots(), swaps)
        self._next_step_id += 1
        self._in_flight.append(record)
        return message

    # ------------------------------------------------------------------------------------ update_from_output

    def update_from_output(self, output: ModelRunnerOutput, now_ns: int) -> StepResult:
        """Take the result of the oldest step in flight; raises ValueError for any other step's."""
        if not self._in_flight or self._in_flight[0].step_id != output.step_id:
            expected = self._in_flight[0].step_id if self._in_flight else "none"
            raise ValueError(f"the executor answered step {output.step_id}; the oldest in flight is {expected}")
        record = self._in_flight.popleft()
        self._sessions.set_time(now_ns)
        self._num_steps += 1
        self._num_computed_tokens += record.shape.num_tokens
        seconds = self._executor_times.on_result(output)
        if not record.has_swaps:
            self._step_times.observe(record.shape, seconds)
        if output.prompt_logprobs:
            by_slot = dict(zip(record.slots, record.sequences, strict=True))
            for chunk in output.prompt_logprobs:
                self._book.outputs.add_prompt_logprobs(by_slot[chunk.slot], chunk.start, chunk.columns)
        self._book.take_tokens(record, output)
        self._executor_times.on_planned(self.has_work)
        times = StepTimes(
            step_id=record.step_id,
            scheduled_ns=record.scheduled_ns,
            executor_received_ns=output.received_ns,
            executor_started_ns=output.started_ns,
            executor_finished_ns=output.sent_ns,
            result_received_ns=now_ns,
            num_tokens=record.shape.num_tokens,
            num_sequences=record.shape.num_sequences,
        )
        request_ids = frozenset([sequence.request.request_id for sequence in record.sequences])
        return StepResult(self.take_outputs(), times, request_ids)

    # ---------------------------------------------------------------------------------------------- sessions

    def list_sessions(self, owner: str, now_ns: int) -> tuple[SessionInfo, ...]:
        """The sessions of one owner that are kept now."""
        self._sessions.set_time(now_ns)
        return self._sessions.of_owner(owner)

    def drop_session(self, session: SessionRef, now_ns: int) -> bool:
        """Keep its pages no longer, nor those of its turns under way; False if there is neither."""
        self._sessions.set_time(now_ns)
        found = self._sessions.drop(session)
        for request in self._book.requests.values():
            if request.session == session:
                request.session, found = None, True
        return found

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
            num_sessions=len(self._sessions),
            executor_busy_ns=self._executor_times.busy_ns,
            executor_idle_ns=self._executor_times.idle_ns,
            swapped_out_pages=self._swaps.pages_out,
            swapped_in_pages=self._swaps.pages_in,
            swapped_in_tokens=self._swaps.tokens_in,
            num_swapped_pages=self._swaps.num_held,
            num_host_pages=self._swaps.num_host_pages,
            step_costs=model.costs.terms if model.is_fitted else (),
        )

    def check_integrity(self) -> list[str]:
        """What is wrong with the books; empty when sound. Takes time that grows with everything held."""
        running, waiting = self._running, self._waiting
        return [
            *self._kv.check_integrity(sequence.block_table for sequence in running),
            *self._prefixes.check_integrity(running),
            *self._sessions.check_integrity(),
            *self._swaps.check_integrity(waiting, running),
            *integrity.check_running(running, self._kv.page_size),
            *integrity.check_waiting(waiting),
            *integrity.check_known([*running, *waiting]),
            *integrity.check_slots(running, self._residents.free_slots, self._max_num_seqs),
            *integrity.check_queues(running, waiting, self._book.requests),
            *waiting.check_integrity(running),
            *integrity.check_in_flight([*running, *waiting], self._in_flight, self._max_steps_in_flight),
        ]
