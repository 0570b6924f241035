"""Who is let into the queue, and who is sent away from it: refusals with their predictions.

A request is looked at when it comes, and, where it has a deadline or the queue a time limit, again while it waits for
its first step: what can no longer be served in time is refused before anything is computed for it.
"""

from __future__ import annotations

from collections.abc import Collection

from ringserve.config import SchedulerConfig
from ringserve.engine.admission import Admission
from ringserve.engine.policy import Policy
from ringserve.engine.residents import Residents
from ringserve.engine.sequence import Request, Sequence
from ringserve.engine.wait_prediction import Prediction, WaitPredictor
from ringserve.messages.requests import RequestRefused

SWEEP_INTERVAL_NS = 50_000_000
"""How often the queue is searched for requests that have waited too long."""
MOST_PREDICTIONS = 8
"""Of one such search. Each looks at the whole queue, and those that run wait for it: where many are sent away together,
the first ones' predictions must do for all."""


class Gate:
    """In front of the waiting queue."""

    def __init__(self, config: SchedulerConfig, residents: Residents, policy: Policy, predictor: WaitPredictor) -> None:
        self._admission = Admission(config)
        self._residents = residents
        self._waiting = policy
        self._predictor = predictor
        self._is_watched = self._admission.has_timeout
        """Somebody may have to be sent away. Deadlines set it; an empty queue takes it back."""
        self._next_sweep_ns = 0

    def why_refused(self, sequence: Sequence, now_ns: int) -> RequestRefused | None:
        """Whether a request may wait; ``sequence`` is one of its choices. None: it may."""
        request, admission = sequence.request, self._admission
        reason = admission.why_too_many(request, self._waiting)
        prediction = None
        if reason is not None or admission.wants_prediction(request):
            prediction = self.predict(sequence)
        if reason is None and prediction is not None:
            reason = admission.why_too_late(request, prediction, now_ns)
        if reason is None:
            reason = admission.why_overdue(request, now_ns)
        if reason is None:
            self._is_watched = self._is_watched or request.has_deadline
            return None
        return admission.refusal(request.request_id, reason, prediction.wait if prediction is not None else None)

    def predict(self, sequence: Sequence) -> Prediction | None:
        """When a sequence that waits, or is about to, will be served."""
        prefixes = self._residents.prefixes
        cached = prefixes.lookup(sequence) or []
        return self._predictor.predict(
            sequence.request,
            self._residents.running,
            self._waiting.ahead_of(sequence),
            prefixes.num_cached(sequence, cached),
        )

    def overdue(self, now_ns: int) -> Collection[tuple[Request, RequestRefused]]:
        """Requests that wait in vain, with their refusals; now and then, since all that wait are looked at."""
        if not self._is_watched or now_ns < self._next_sweep_ns:
            return ()
        self._next_sweep_ns = now_ns + SWEEP_INTERVAL_NS
        if not len(self._waiting):
            self._is_watched = self._admission.has_timeout
            return ()
        found: list[tuple[Request, RequestRefused]] = []
        wait: float | None = None
        for request in dict.fromkeys(sequence.request for sequence in self._waiting):
            reason = self._why_overdue(request, now_ns)
            if reason is None:
                continue
            if len(found) < MOST_PREDICTIONS:
                prediction = self.predict(next(iter(request.live.values())))
                wait = prediction.wait if prediction is not None else None
            found.append((request, self._admission.refusal(request.request_id, reason, wait)))
        return found

    def _why_overdue(self, request: Request, now_ns: int) -> tuple[str, str] | None:
        if not (self._admission.has_timeout or request.has_deadline) or not request.is_untouched:
            return None
        reason = self._admission.why_overdue(request, now_ns)
        if reason is not None or not request.has_deadline:
            return reason
        if not request.latest_start_ns:  # worked out once: the whole queue is looked at often
            request.latest_start_ns = self._latest_start_ns(request)
        if request.latest_start_ns and now_ns > request.latest_start_ns:
            return "deadline_unreachable", "The request has waited until even its turn would come too late."
        return None

    def _latest_start_ns(self, request: Request) -> int:
        """When it must start to be served in time, with the server to itself; 0 while nobody can say."""
        sequence = next(iter(request.live.values()))
        cached = self._residents.prefixes.lookup(sequence) or []
        soonest = self._predictor.predict(request, (), (), len(cached) * self._residents.kv.page_size)
        if soonest is None:
            return 0
        starts = [
            due_ns - int(seconds * 1e9)
            for due_ns, seconds in (
                (request.first_token_due_ns, soonest.first_token),
                (request.due_ns, soonest.finish),
            )
            if due_ns
        ]
        return max(1, min(starts))
