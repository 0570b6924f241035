"""Figures of a simulated run, by the definitions of ``ringserve.bench.metrics``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from ringserve.bench.load_options import Point
from ringserve.bench.metrics import Goodput, Summary
from ringserve.simulate.client import SentRequest
from ringserve.simulate.engine import Outcome

Floats = npt.NDArray[np.float64]
QUANTILES = tuple(index / 100 for index in range(101))


class TenantService(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant got."""

    tenant: str
    requests: int
    completed: int
    prompt_tokens: int
    """Of completed requests, those from the prefix cache included."""
    output_tokens: int
    output_share: float
    """Of all tenants' output tokens that came while every tenant had something unfinished."""
    ttft_ms: Summary | None
    e2e_ms: Summary | None


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Latencies in ms, rates per second of ``duration_s`` (virtual time)."""

    policy: str
    point: Point
    duration_s: float
    """First request sent to last one ended."""
    requests: int
    completed: int
    refused: int
    reasons: dict[str, int]
    """Why, with how many."""
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    """Prompt tokens that the prefix cache had."""
    cache_hit_rate: float
    preemptions: int
    preempted_tokens: int
    """Tokens computed again after preemption."""
    steps: int
    mean_batch: float
    """Sequences in a step."""
    busy: float
    """Part of the time in which the executor computes."""
    mean_concurrency: float
    ttft_ms: Summary | None
    itl_ms: Summary | None
    tpot_ms: Summary | None
    e2e_ms: Summary | None
    ttft_quantiles_ms: tuple[float, ...]
    """At 0, 1, ... 100 %."""
    e2e_quantiles_ms: tuple[float, ...]
    goodput: Goodput | None
    tenants: tuple[TenantService, ...]
    simulated_in_s: float


def compute(outcome: Outcome, policy: str, point: Point, objectives_ms: Mapping[str, float]) -> Figures:
    """All figures of a run. Token counts and latencies are of completed requests only."""
    requests = outcome.requests
    done = [request for request in requests if not request.refused]
    duration = (max(r.ended_ns for r in requests) - min(r.sent_ns for r in requests)) * 1e-9 if requests else 0.0
    rate = 1 / duration if duration > 0 else 0.0
    ttft, tpot, e2e = _latencies(done)
    stats = outcome.stats
    reasons: dict[str, int] = {}
    for request in requests:
        if request.refused:
            reasons[request.refused] = reasons.get(request.refused, 0) + 1
    output_tokens = sum(request.num_output_tokens for request in done)
    in_flight = sum(request.ended_ns - request.sent_ns for request in requests) * 1e-9
    return Figures(
        policy=policy,
        point=point,
        duration_s=duration,
        requests=len(requests),
        completed=len(done),
        refused=len(requests) - len(done),
        reasons=dict(sorted(reasons.items(), key=lambda item: -item[1])[:5]),
        requests_per_s=len(done) * rate,
        output_tokens_per_s=output_tokens * rate,
        prompt_tokens=sum(request.num_prompt_tokens for request in done),
        output_tokens=output_tokens,
        cached_tokens=stats.num_prefix_hits,
        cache_hit_rate=stats.num_prefix_hits / stats.num_prefix_queries if stats.num_prefix_queries else 0.0,
        preemptions=stats.num_preemptions,
        preempted_tokens=stats.preempted_tokens,
        steps=stats.num_steps,
        mean_batch=outcome.num_rows / stats.num_steps if stats.num_steps else 0.0,
        busy=outcome.busy_s * rate,
        mean_concurrency=in_flight * rate,
        ttft_ms=summarize(ttft),
        itl_ms=summarize(np.frombuffer(outcome.gaps, dtype=np.float32) * 1e3),
        tpot_ms=summarize(tpot[np.isfinite(tpot)]),
        e2e_ms=summarize(e2e),
        ttft_quantiles_ms=_quantiles(ttft),
        e2e_quantiles_ms=_quantiles(e2e),
        goodput=_goodput(ttft, tpot, e2e, len(requests), objectives_ms, rate) if objectives_ms else None,
        tenants=_tenants(requests),
        simulated_in_s=outcome.wall_s,
    )


def summarize(values: npt.NDArray[np.floating]) -> Summary | None:
    """Mean and percentiles; None without values."""
    if not len(values):
        return None
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return Summary(float(values.mean(dtype=np.float64)), p50, p90, p99, float(values.max()))


def _latencies(done: Sequence[SentRequest]) -> tuple[Floats, Floats, Floats]:
    """(TTFT, TPOT, E2E) in ms; TPOT is infinite for answers of one token, which meet any."""
    columns = np.array(
        [(r.sent_ns, r.first_token_ns, r.last_token_ns, r.ended_ns, r.num_output_tokens) for r in done],
        dtype=np.float64,
    ).reshape(-1, 5)
    sent, first, last, ended, tokens = columns.T
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = np.where(tokens > 1, (last - first) / (tokens - 1), np.inf)
    return (first - sent) * 1e-6, tpot * 1e-6, (ended - sent) * 1e-6


def _quantiles(values: Floats) -> tuple[float, ...]:
    return tuple(np.quantile(values, QUANTILES).tolist()) if len(values) else ()


def _goodput(
    ttft: Floats, tpot: Floats, e2e: Floats, sent: int, objectives_ms: Mapping[str, float], rate: float
) -> Goodput:
    seen = {"ttft": ttft, "tpot": np.where(np.isfinite(tpot), tpot, 0.0), "e2e": e2e}
    good = np.ones(len(ttft), dtype=bool)
    for name, limit in objectives_ms.items():
        good &= seen[name] <= limit
    count = int(good.sum())
    return Goodput(dict(objectives_ms), count * rate, count / sent if sent else 0.0)


def _tenants(requests: Sequence[SentRequest]) -> tuple[TenantService, ...]:
    groups: dict[str, list[SentRequest]] = {}
    for request in requests:
        groups.setdefault(request.conversation.tenant, []).append(request)
    if len(groups) < 2:
        return ()
    # Shares mean something only while all of them ask for service.
    until = min(max(request.ended_ns for request in group) for group in groups.values())
    shares = {name: sum(_tokens_until(request, until) for request in group) for name, group in groups.items()}
    total = sum(shares.values())
    found = []
    for name, group in sorted(groups.items()):
        done = [request for request in group if not request.refused]
        ttft, _, e2e = _latencies(done)
        found.append(
            TenantService(
                tenant=name,
                requests=len(group),
                completed=len(done),
                prompt_tokens=sum(request.num_prompt_tokens for request in done),
                output_tokens=sum(request.num_output_tokens for request in done),
                output_share=shares[name] / total if total else 0.0,
                ttft_ms=summarize(ttft),
                e2e_ms=summarize(e2e),
            )
        )
    return tuple(found)


def _tokens_until(request: SentRequest, until_ns: int) -> float:
    """Output tokens up to a moment, taken as evenly spread from the first to the last."""
    if request.first_token_ns < 0 or request.first_token_ns > until_ns:
        return 0.0
    if request.last_token_ns <= until_ns:
        return float(request.num_output_tokens)
    part = (until_ns - request.first_token_ns) / (request.last_token_ns - request.first_token_ns)
    return 1 + part * (request.num_output_tokens - 1)
