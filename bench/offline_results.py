"""What ``ringserve bench offline`` finds: one side's batch, rounds, and the medians over them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import msgspec


class Side(msgspec.Struct, frozen=True):
    """One side's batch in one round."""

    seconds: float
    """First request sent to last token received."""
    output_tokens_per_s: float
    ttft_ms_p50: float
    """First token - sent. Offline all are sent at once, too."""
    tpot_ms_p50: float | None
    """(Last token - first token) / (tokens - 1); None for one token."""
    cpu_seconds: dict[str, float]
    """By process; ``client`` is this one: the load generator, or the offline engine's frontend."""
    hops_us: dict[str, float]
    """Serving only: mean time of a step's data on each way, in microseconds."""


class Round(msgspec.Struct, frozen=True):
    """One batch size in one round."""

    num_requests: int
    round: int
    offline: Side
    serving: Side | None
    other_cores: float
    """Used by other processes of this machine meanwhile."""


class Row(msgspec.Struct, frozen=True):
    """One batch size: medians over the rounds."""

    num_requests: int
    offline_tokens_per_s: float
    serving_tokens_per_s: float | None
    ratio: float | None
    """Median of the rounds' serving / offline."""
    ratio_low: float | None
    ratio_high: float | None
    ttft_ms_p50: dict[str, float]
    """By side."""
    tpot_ms_p50: dict[str, float]
    offline_cpu_ms_per_token: dict[str, float]
    serving_cpu_ms_per_token: dict[str, float]
    hops_us: dict[str, float]


def summarize(rounds: Sequence[Round]) -> list[Row]:
    """Medians and ratios; sizes in their order."""
    rows = []
    for size in dict.fromkeys(one.num_requests for one in rounds):
        these = [one for one in rounds if one.num_requests == size]
        offline = [one.offline for one in these]
        serving = [one.serving for one in these if one.serving is not None]
        ratios = [
            one.serving.output_tokens_per_s / one.offline.output_tokens_per_s
            for one in these
            if one.serving is not None
        ]
        rows.append(
            Row(
                num_requests=size,
                offline_tokens_per_s=statistics.median(side.output_tokens_per_s for side in offline),
                serving_tokens_per_s=statistics.median(side.output_tokens_per_s for side in serving)
                if serving
                else None,
                ratio=statistics.median(ratios) if ratios else None,
                ratio_low=min(ratios, default=None),
                ratio_high=max(ratios, default=None),
                ttft_ms_p50=_by_side(offline, serving, lambda side: side.ttft_ms_p50),
                tpot_ms_p50=_by_side(offline, serving, lambda side: side.tpot_ms_p50),
                offline_cpu_ms_per_token=_cpu_per_token(offline),
                serving_cpu_ms_per_token=_cpu_per_token(serving),
                hops_us=_medians([side.hops_us for side in serving]),
            )
        )
    return rows


def _by_side(
    offline: Sequence[Side], serving: Sequence[Side], read: Callable[[Side], float | None]
) -> dict[str, float]:
    found = {}
    for name, sides in (("offline", offline), ("serving", serving)):
        values = [value for side in sides if (value := read(side)) is not None]
        if values:
            found[name] = statistics.median(values)
    return found


def _cpu_per_token(sides: Sequence[Side]) -> dict[str, float]:
    """Milliseconds of CPU time by process, for each output token."""
    shares = []
    for side in sides:
        tokens = side.output_tokens_per_s * side.seconds
        shares.append({name: seconds * 1e3 / tokens for name, seconds in side.cpu_seconds.items()})
    return _medians(shares)


def _medians(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for one in each for name in one)
    return {name: statistics.median(one[name] for one in each if name in one) for name in names}
