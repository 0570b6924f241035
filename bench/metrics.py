"""Figures from raw time stamps. Pure functions.

Definitions (the field's):
    TTFT   first chunk with output - sent.
    ITL    gap between neighbouring chunks of a stream. Where the server counts tokens in every chunk, a gap before a
           chunk of k tokens is k gaps of a k-th; elsewhere it stays one, and ``tokens_per_chunk`` tells how much that
           hides.
    TPOT   (last chunk - first chunk) / (output tokens - 1), for answers of two tokens and two chunks or more.
    E2E    last byte - sent.
    goodput  requests per second that met every objective given.
Percentiles interpolate linearly between ranks, as numpy does by default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from ringserve.bench.records import RequestRecord


class Summary(msgspec.Struct, frozen=True):
    """A distribution."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class ErrorCount(msgspec.Struct, frozen=True):
    """Failures of one kind, with the first one's message."""

    kind: str
    count: int
    first_message: str


class Goodput(msgspec.Struct, frozen=True):
    """How much was served within the objectives."""

    objectives_ms: dict[str, float]
    requests_per_s: float
    part: float
    """Of all requests sent, failed ones included."""


class Metrics(msgspec.Struct, kw_only=True, frozen=True):
    """One run's figures. Latencies in ms, rates per second of ``duration_s``."""

    duration_s: float
    """First request sent to last one ended."""
    completed: int
    failed: int
    interrupted: int
    requests_per_s: float
    output_tokens: int
    prompt_tokens: int | None
    """None where neither the server nor the client knows."""
    output_tokens_per_s: float
    total_tokens_per_s: float | None
    tokens_from: str
    """``usage`` (the server's count), ``chunks`` (usage missing: chunks were counted instead) or ``both``."""
    tokens_per_chunk: float | None
    mean_concurrency: float
    """Requests in flight, averaged over the run."""
    ttft_ms: Summary | None
    itl_ms: Summary | None
    tpot_ms: Summary | None
    e2e_ms: Summary | None
    goodput: Goodput | None
    errors: list[ErrorCount]
    send_lag_ms_max: float
    """How late the client itself sent a request, at worst."""


OBJECTIVES = ("ttft", "tpot", "e2e")


def percentile(values: Sequence[float], part: float) -> float:
    """``part`` (0 to 1) of the values lie below. Linear interpolation.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    position = part * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarize(values: Sequence[float]) -> Summary | None:
    """Mean and percentiles; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return Summary(
        mean=math.fsum(ordered) / len(ordered),
        p50=percentile(ordered, 0.5),
        p90=percentile(ordered, 0.9),
        p99=percentile(ordered, 0.99),
        max=ordered[-1],
    )


def output_tokens(record: RequestRecord) -> int:
    """The server's count, or the number of chunks where it gave none."""
    return record.usage.completion_tokens if record.usage else len(record.chunk_times)


def prompt_tokens(record: RequestRecord) -> int | None:
    """The server's count, else what the client knows."""
    counted = record.usage.prompt_tokens if record.usage else None
    return record.asked_prompt_tokens if counted is None else counted


def ttft(record: RequestRecord) -> float | None:
    """Seconds to the first chunk with output."""
    return record.chunk_times[0] - record.sent if record.chunk_times else None


def tpot(record: RequestRecord) -> float | None:
    """Seconds per output token after the first; None for answers of one token, or in one chunk: nothing to see."""
    tokens = output_tokens(record)
    if tokens < 2 or len(record.chunk_times) < 2:
        return None
    return (record.chunk_times[-1] - record.chunk_times[0]) / (tokens - 1)


def e2e(record: RequestRecord) -> float:
    """Seconds from sending to the last byte."""
    return record.ended - record.sent


def inter_token_latencies(record: RequestRecord) -> list[float]:
    """Seconds between tokens; see the module's definition for chunks of several tokens."""
    gaps = [later - earlier for earlier, later in zip(record.chunk_times, record.chunk_times[1:], strict=False)]
    if record.chunk_tokens is None:
        return gaps
    spread: list[float] = []
    for gap, tokens in zip(gaps, record.chunk_tokens[1:], strict=True):
        spread += [gap / tokens] * tokens if tokens > 1 else [gap]
    return spread


def meets(record: RequestRecord, objectives_ms: Mapping[str, float]) -> bool:
    """Whether a completed request met every objective. An answer of one token, or in one chunk, meets any TPOT."""
    seen = {"ttft": ttft(record), "tpot": tpot(record), "e2e": e2e(record)}
    return all((seen[name] or 0.0) * 1e3 <= limit for name, limit in objectives_ms.items())


def compute(records: Sequence[RequestRecord], objectives_ms: Mapping[str, float] | None = None) -> Metrics:
    """All figures of a run. Token counts, rates and latencies are of completed requests only."""
    done = [record for record in records if record.failure is None]
    interrupted = sum(1 for record in records if record.failure and record.failure.kind == "interrupted")
    duration = max(r.ended for r in records) - min(r.sent for r in records) if records else 0.0
    rate = 1 / duration if duration > 0 else 0.0
    out = sum(output_tokens(record) for record in done)
    prompts = [prompt_tokens(record) for record in done]
    known = [count for count in prompts if count is not None]
    prompt_total = sum(known) if len(known) == len(prompts) else None
    chunks = sum(len(record.chunk_times) for record in done)
    counted = {record.usage is not None for record in done}
    return Metrics(
        duration_s=duration,
        completed=len(done),
        failed=len(records) - len(done) - interrupted,
        interrupted=interrupted,
        requests_per_s=len(done) * rate,
        output_tokens=out,
        prompt_tokens=prompt_total,
        output_tokens_per_s=out * rate,
        total_tokens_per_s=None if prompt_total is None else (out + prompt_total) * rate,
        tokens_from="both" if len(counted) == 2 else "usage" if counted != {False} else "chunks",
        tokens_per_chunk=out / chunks if chunks else None,
        mean_concurrency=math.fsum(e2e(record) for record in records) * rate,
        ttft_ms=_summary_ms([ttft(record) for record in done]),
        itl_ms=_summary_ms([gap for record in done for gap in inter_token_latencies(record)]),
        tpot_ms=_summary_ms([tpot(record) for record in done]),
        e2e_ms=_summary_ms([e2e(record) for record in done]),
        goodput=_goodput(records, done, objectives_ms, rate) if objectives_ms else None,
        errors=_errors(records),
        send_lag_ms_max=max((record.sent - record.due for record in records), default=0.0) * 1e3,
    )


def _summary_ms(seconds: Sequence[float | None]) -> Summary | None:
    return summarize([value * 1e3 for value in seconds if value is not None])


def _goodput(
    records: Sequence[RequestRecord], done: Sequence[RequestRecord], objectives_ms: Mapping[str, float], rate: float
) -> Goodput:
    good = sum(meets(record, objectives_ms) for record in done)
    return Goodput(dict(objectives_ms), good * rate, good / len(records) if records else 0.0)


def _errors(records: Sequence[RequestRecord]) -> list[ErrorCount]:
    found: dict[str, list[str]] = {}
    for record in records:
        if record.failure and record.failure.kind != "interrupted":
            found.setdefault(record.failure.kind, []).append(record.failure.message)
    return [ErrorCount(kind, len(messages), messages[0]) for kind, messages in found.items()]
