"""By when a request wants to be served: its deadline and its targets, from the body to ``time.monotonic_ns()``.

``deadline_ms`` counts from the request's arrival, ``deadline_at`` is a Unix time in seconds; both are about the end of
the answer. ``target_ttft_ms`` is the time to the first token, ``target_tpot_ms`` the time between tokens.
"""

from __future__ import annotations

import math
import time

from ringserve.frontend.errors import invalid
from ringserve.frontend.protocol import GenerationBody
from ringserve.messages.requests import NO_TARGETS, ServiceTargets

MAX_MS = 86_400_000.0
"""A day: whoever has more time has no deadline."""


def service_targets(body: GenerationBody, received_ns: int) -> ServiceTargets:
    """Raises 400 for what is no time, or no time to come."""
    deadline = _milliseconds(body.deadline_ms, "deadline_ms")
    ttft = _milliseconds(body.target_ttft_ms, "target_ttft_ms")
    tpot = _milliseconds(body.target_tpot_ms, "target_tpot_ms")
    if body.deadline_at is not None:
        if deadline is not None:
            raise invalid("deadline_ms and deadline_at cannot both be given.", "deadline_at")
        # From its arrival, as the others are: its body may have come much later.
        deadline = _until(body.deadline_at) + (time.monotonic_ns() - received_ns) * 1e-6
    if deadline is None and ttft is None and tpot is None:
        return NO_TARGETS
    return ServiceTargets(
        due_ns=_due_ns(deadline, received_ns),
        first_token_due_ns=_due_ns(ttft, received_ns),
        time_per_token_ns=0 if tpot is None else max(1, int(tpot * 1e6)),
    )


def _milliseconds(value: float | None, name: str) -> float | None:
    if value is not None and not 0 < value <= MAX_MS:
        raise invalid(f"{name} must be greater than 0 and at most {MAX_MS:.0f} milliseconds, got {value}.", name)
    return value


def _until(unix_seconds: float) -> float:
    """Milliseconds from now; may have passed, which the scheduler refuses like any deadline that cannot be kept."""
    milliseconds = (unix_seconds - time.time()) * 1e3
    if not math.isfinite(unix_seconds) or abs(milliseconds) > MAX_MS:
        raise invalid(
            f"deadline_at must be a Unix time in seconds, not more than a day from now, got {unix_seconds}.",
            "deadline_at",
        )
    return milliseconds


def _due_ns(milliseconds: float | None, received_ns: int) -> int:
    """0 stands for no deadline."""
    return 0 if milliseconds is None else max(1, received_ns + int(milliseconds * 1e6))
