"""Which requests are refused before anything of them is computed: those that can never be served, and those that the
server has no time for.

A refusal for want of time says how long the wait would have been and when to come again; its HTTP status is 503 or 429
(``--overload-status``). The module is given the queue's numbers and the time; it keeps no state but the configuration.
"""

from __future__ import annotations

from collections.abc import Iterable

from ringserve.config import SchedulerConfig
from ringserve.engine.sequence import Request, Sequence
from ringserve.engine.wait_prediction import Prediction
from ringserve.messages.requests import RequestRefused, TokenizedRequest

SHORTEST_RETRY = 0.1
LONGEST_RETRY = 120.0
"""Seconds; OpenAI's client takes a longer one for none at all."""


def why_impossible(message: TokenizedRequest, max_model_len: int, known: bool) -> RequestRefused | None:
    """Why a request can never be computed; None if it can. ``known``: one with its id is being served."""
    num_prompt_tokens = len(message.prompt_token_ids) // 4
    if num_prompt_tokens == 0:
        return RequestRefused(message.request_id, 400, "The prompt has no tokens.", param="prompt")
    if message.n < 1 or message.max_tokens < 0:
        text = f"n must be at least 1 and max_tokens at least 0, not {message.n} and {message.max_tokens}."
        return RequestRefused(message.request_id, 400, text)
    if known:
        text = f"Request {message.request_id} is already being served."
        return RequestRefused(message.request_id, 500, text, type="server_error")
    if num_prompt_tokens + 1 > max_model_len:
        return RequestRefused(
            message.request_id,
            400,
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt has "
            f"{num_prompt_tokens} tokens, which leaves no room for an answer. Please shorten the prompt.",
            param="prompt",
            code="context_length_exceeded",
        )
    return None


class Admission:
    """Refusals for want of time."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._queue_timeout_ns = int(config.queue_timeout * 1e9)

    @property
    def has_timeout(self) -> bool:
        """Requests may be refused for having waited."""
        return self._queue_timeout_ns > 0

    def wants_prediction(self, request: Request) -> bool:
        """``why_too_late`` looks at one."""
        return self._config.max_predicted_wait > 0 or request.has_deadline or request.time_per_token_ns > 0

    def why_too_many(self, request: Request, waiting: Iterable[Sequence]) -> tuple[str, str] | None:
        """(code, message) where a bound of the queue is reached. One request may always wait, whatever its size."""
        config = self._config
        most = config.max_num_queued_tokens
        if most is not None:
            queued = {sequence.request for sequence in waiting if not sequence.first_scheduled_ns}
            num_tokens = sum(each.num_prompt_tokens for each in queued)
            if num_tokens and num_tokens + request.num_prompt_tokens > most:
                return "max_num_queued_tokens", (
                    f"{num_tokens} prompt tokens wait on this server; with the {request.num_prompt_tokens} of this "
                    f"request there would be more than the {most} that may."
                )
        most = config.max_num_queued_per_tenant
        if most is not None:
            num_waiting = sum(sequence.request.tenant == request.tenant for sequence in waiting)
            if num_waiting and num_waiting + request.n > most:
                return "max_num_queued_per_tenant", (
                    f"{num_waiting} of your choices wait on this server; with the {request.n} of this request there "
                    f"would be more than the {most} that may."
                )
        return None

    def why_too_late(self, request: Request, prediction: Prediction, now_ns: int) -> tuple[str, str] | None:
        """(code, message) where the request is predicted to be served later than it, or the server, wants."""
        limit = self._config.max_predicted_wait
        if limit and prediction.wait > limit:
            shown = _seconds(prediction.wait)
            return "max_predicted_wait", f"The predicted wait is {shown}, more than the {_seconds(limit)} allowed."
        for due_ns, predicted, what in (
            (request.first_token_due_ns, prediction.first_token, "first token"),
            (request.due_ns, prediction.finish, "end"),
        ):
            if due_ns and now_ns + predicted * 1e9 > due_ns:
                return "deadline_unreachable", (
                    f"The {what} of the answer is predicted in {_seconds(predicted)}, but due in "
                    f"{_seconds((due_ns - now_ns) * 1e-9)}."
                )
        per_token = request.time_per_token_ns * 1e-9
        if per_token and prediction.time_per_token > per_token:
            return "deadline_unreachable", (
                f"The time between tokens is predicted as {_seconds(prediction.time_per_token)}, more than "
                f"{_seconds(per_token)}."
            )
        return None

    def why_overdue(self, request: Request, now_ns: int) -> tuple[str, str] | None:
        """(code, message) where a request has waited too long for its first step."""
        waited_ns = now_ns - request.queued_ns
        if self._queue_timeout_ns and waited_ns > self._queue_timeout_ns:
            return "queue_timeout", f"The request has waited {_seconds(waited_ns * 1e-9)} for its turn in vain."
        due = [due_ns for due_ns in (request.first_token_due_ns, request.due_ns) if due_ns]
        if due and now_ns > min(due):
            return "deadline_unreachable", "The request was due before its turn came."
        return None

    def refusal(self, request_id: int, reason: tuple[str, str], wait: float | None) -> RequestRefused:
        """The answer. ``wait``: the predicted wait in seconds, where there is one."""
        code, message = reason
        retry_after = 1.0 if wait is None else min(max(wait, SHORTEST_RETRY), LONGEST_RETRY)
        return RequestRefused(
            request_id,
            self._config.overload_status,
            message,
            type="rate_limit_error" if self._config.overload_status == 429 else "server_error",
            code=code,
            retry_after=retry_after,
            predicted_wait=wait,
        )


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if abs(seconds) < 1 else f"{seconds:.1f} s"
