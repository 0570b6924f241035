"""The scheduler process: an actor around the pure ``Scheduler``.

startup: nothing to load. loop: requests and aborts come from the tokenizers, results from the executor; each turn
keeps up to two steps in the executor's ring and tells every tokenizer concerned what a result came to. There are no
timers: with nothing to compute it sleeps until a message comes.

This module knows the neighbours and the clock; who advances is ``scheduler.py``'s business.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import assert_never

from ringserve.actor import ActorContext, BlockingActor
from ringserve.config import SchedulerSettings
from ringserve.engine.pressure_log import PressureLog
from ringserve.engine.scheduler import Scheduler
from ringserve.engine.scheduler_outputs import OutputBatch, pack_token_outputs
from ringserve.messages.integrity import CheckIntegrity, IntegrityReport
from ringserve.messages.requests import Abort, RequestRefused, TokenizedRequest
from ringserve.messages.rings import ExecutorMessage, SchedulerInbound
from ringserve.messages.sessions import DropSession, ListSessions, SessionDropped, SessionList
from ringserve.messages.startup import ExecutorReady, LoadProgress, Started
from ringserve.messages.stats import EngineStats, StepTimes
from ringserve.messages.steps import ModelRunnerOutput

LOADING_RETRY_AFTER = 2.0
"""Seconds after which a client may try again while the model loads."""


def create(context: ActorContext) -> BlockingActor:
    """The scheduler's actor; its neighbours are "executor" and "tokenizer-0", "tokenizer-1", ..."""
    return SchedulerActor(context)


class SchedulerActor:
    """Mailbox in front of one ``Scheduler``, which exists from ``ExecutorReady`` on."""

    def __init__(self, context: ActorContext, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._context = context
        self._clock = clock
        settings: SchedulerSettings = context.settings
        self._config = settings.config
        self._executor = context.outboxes["executor"]
        self._tokenizers = {role: box for role, box in context.outboxes.items() if role.startswith("tokenizer-")}
        self._scheduler: Scheduler | None = None
        self._routes: dict[int, str] = {}
        """The tokenizer that each live request came from, and that gets its answers."""
        self._last_stats: dict[str, EngineStats] = {}
        """What each tokenizer was told last."""
        self._pressure = PressureLog()

    # ----------------------------------------------------------------------------------------------- startup

    def startup(self) -> None:
        self._context.report(Started({}))

    # -------------------------------------------------------------------------------------------------- loop

    def handle(self, message: SchedulerInbound | ExecutorMessage, source: str) -> None:
        match message:
            case ModelRunnerOutput():
                self._on_result(message)
            case TokenizedRequest():
                self._on_request(message, source)
            case Abort():
                if self._scheduler is not None:
                    self._scheduler.abort(message.request_id, message.choice, message.reason)
            case ExecutorReady():
                if self._scheduler is not None:
                    raise ValueError("the executor reported ready twice")
                self._scheduler = Scheduler(message, self._config)
                self._broadcast(message)
            case LoadProgress():
                self._broadcast(message)
            case CheckIntegrity():
                self._tokenizers[source].send(self._integrity_report(message))
            case ListSessions():
                sessions = self._scheduler.list_sessions(message.owner, self._clock()) if self._scheduler else ()
                self._tokenizers[source].send(SessionList(message.request_id, sessions))
            case DropSession():
                found = self._scheduler is not None and self._scheduler.drop_session(message.session, self._clock())
                self._tokenizers[source].send(SessionDropped(message.request_id, found))
            case _:
                assert_never(message)

    def act(self) -> bool:
        """Hand on what aborts came to, fill the executor's ring, and leave fresh numbers before going idle.

        Requests that wait too long are refused here; no timer is needed for it, since whoever waits, waits for others
        whose results come.
        """
        scheduler = self._scheduler
        if scheduler is None:
            return False
        self._send_outputs(scheduler, scheduler.take_outputs(), None, frozenset())
        while (step := scheduler.schedule(self._clock())) is not None:
            self._executor.send(step)
        for refused in scheduler.take_refusals():
            self._tokenizers[self._routes.pop(refused.request_id)].send(refused)
        self._pressure.look(scheduler, self._clock())
        if scheduler.num_steps_in_flight == 0:
            self._send_stale_stats(scheduler)
        return False  # whatever comes next comes with a message

    # ---------------------------------------------------------------------------------------------- shutdown

    def shutdown(self) -> None:
        """Nothing is held outside this process."""

    # ----------------------------------------------------------------------------------------------- details

    def _on_request(self, message: TokenizedRequest, source: str) -> None:
        if self._scheduler is None:
            refused: RequestRefused | None = RequestRefused(
                message.request_id,
                503,
                "The model is still loading.",
                type="server_error",
                code="model_loading",
                retry_after=LOADING_RETRY_AFTER,
            )
        else:
            refused = self._scheduler.add_request(message, self._clock())
        if refused is not None:
            self._tokenizers[source].send(refused)
        elif self._scheduler is not None:
            self._routes[message.request_id] = source
            self._send_outputs(self._scheduler, self._scheduler.take_outputs(), None, frozenset())
            if not self._scheduler.has_request(message.request_id):  # every choice entered at its end
                self._routes.pop(message.request_id, None)

    def _on_result(self, message: ModelRunnerOutput) -> None:
        if self._scheduler is None:
            raise ValueError("the executor answered a step before it was ready")
        result = self._scheduler.update_from_output(message, self._clock())
        self._send_outputs(self._scheduler, result.outputs, result.times, result.request_ids)

    def _send_outputs(
        self, scheduler: Scheduler, outputs: OutputBatch, times: StepTimes | None, request_ids: frozenset[int]
    ) -> None:
        """One message for each tokenizer that has a row, or had a request in the step."""
        if not outputs and times is None:
            return
        batches = {self._routes[key]: OutputBatch([], []) for key in request_ids if key in self._routes}
        for row in outputs.rows:
            batches.setdefault(self._routes[row.request_id], OutputBatch([], [])).rows.append(row)
        for chunk in outputs.prompt_logprobs:
            batches.setdefault(self._routes[chunk.request_id], OutputBatch([], [])).prompt_logprobs.append(chunk)
        stats = scheduler.stats()
        for role, batch in batches.items():
            self._tokenizers[role].send(pack_token_outputs(batch, times, stats, self._clock()))
            self._last_stats[role] = stats
        for row in outputs.rows:
            if row.finish is not None and not scheduler.has_request(row.request_id):
                self._routes.pop(row.request_id, None)

    def _send_stale_stats(self, scheduler: Scheduler) -> None:
        stats = scheduler.stats()
        for role, box in self._tokenizers.items():
            if self._last_stats.get(role) != stats:
                box.send(pack_token_outputs(OutputBatch([], []), None, stats, self._clock()))
                self._last_stats[role] = stats

    def _broadcast(self, message: ExecutorReady | LoadProgress) -> None:
        for box in self._tokenizers.values():
            box.send(message)

    def _integrity_report(self, message: CheckIntegrity) -> IntegrityReport:
        scheduler = self._scheduler
        if scheduler is None:
            return IntegrityReport(message.request_id, (), 0, 0, 0, message.tokenizer_requests, 0)
        # What aborts of the same batch came to; their routes end with it.
        self._send_outputs(scheduler, scheduler.take_outputs(), None, frozenset())
        stats = scheduler.stats()
        problems = scheduler.check_integrity()
        problems += [
            f"a route to {role} is left of request {key}"
            for key, role in self._routes.items()
            if not scheduler.has_request(key)
        ]
        return IntegrityReport(
            request_id=message.request_id,
            problems=tuple(problems),
            num_free_pages=stats.num_free_pages,
            num_pages=stats.num_pages,
            scheduler_requests=scheduler.num_requests,
            tokenizer_requests=message.tokenizer_requests,
            num_free_slots=scheduler.num_free_slots,
        )
