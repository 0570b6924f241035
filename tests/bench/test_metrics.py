"""Figures on time stamps made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from ringserve.bench.metrics import (
    compute,
    inter_token_latencies,
    meets,
    output_tokens,
    percentile,
    prompt_tokens,
    summarize,
    tpot,
)
from ringserve.bench.records import Failure, RequestRecord, Usage


def record(
    *times: float,
    sent: float = 0.0,
    ended: float | None = None,
    usage: Usage | None = None,
    chunk_tokens: list[int] | None = None,
    failure: Failure | None = None,
    due: float | None = None,
    asked: int | None = None,
) -> RequestRecord:
    return RequestRecord(
        due=sent if due is None else due,
        sent=sent,
        chunk_times=list(times),
        chunk_tokens=chunk_tokens,
        ended=ended if ended is not None else times[-1] if times else sent,
        usage=usage,
        failure=failure,
        asked_prompt_tokens=asked,
    )


def test_percentiles_interpolate() -> None:
    values = [40.0, 10.0, 30.0, 20.0]
    assert percentile(values, 0.0) == 10
    assert percentile(values, 0.5) == 25
    assert percentile(values, 0.9) == pytest.approx(37)
    assert percentile(values, 1.0) == 40
    assert percentile([7.0], 0.99) == 7
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_percentiles_are_numpys() -> None:
    values = np.random.default_rng(3).exponential(size=137)
    for part in (0.01, 0.5, 0.9, 0.99):
        assert percentile(values.tolist(), part) == pytest.approx(np.quantile(values, part))


def test_summary() -> None:
    assert summarize([]) is None
    summary = summarize([1.0, 2.0, 6.0])
    assert summary is not None
    assert (summary.mean, summary.p50, summary.max) == (3.0, 2.0, 6.0)


def test_a_plain_request() -> None:
    metrics = compute([record(1.5, 1.75, 2.25, sent=1.0, ended=2.5, usage=Usage(10, 3))])
    assert metrics.ttft_ms is not None
    assert metrics.ttft_ms.p50 == pytest.approx(500)
    assert metrics.itl_ms is not None
    assert [metrics.itl_ms.p50, metrics.itl_ms.max] == pytest.approx([375, 500])
    assert metrics.tpot_ms is not None
    assert metrics.tpot_ms.p50 == pytest.approx(375)
    assert metrics.e2e_ms is not None
    assert metrics.e2e_ms.p50 == pytest.approx(1500)
    assert metrics.output_tokens_per_s == pytest.approx(3 / 1.5)
    assert metrics.total_tokens_per_s == pytest.approx(13 / 1.5)
    assert metrics.requests_per_s == pytest.approx(1 / 1.5)
    assert metrics.tokens_from == "usage"


def test_duration_is_first_sent_to_last_ended() -> None:
    metrics = compute([record(2, 3, sent=1, usage=Usage(1, 2)), record(4, 6, sent=2, usage=Usage(1, 2))])
    assert metrics.duration_s == 5
    assert metrics.output_tokens_per_s == pytest.approx(4 / 5)
    assert metrics.mean_concurrency == pytest.approx((2 + 4) / 5)


def test_an_answer_of_one_token_has_no_tpot() -> None:
    one = record(1.0, usage=Usage(5, 1))
    assert tpot(one) is None
    assert inter_token_latencies(one) == []
    metrics = compute([one], {"tpot": 1.0})
    assert metrics.tpot_ms is None
    assert metrics.itl_ms is None
    assert metrics.goodput is not None
    assert metrics.goodput.part == 1.0


def test_an_answer_in_one_chunk_has_no_tpot() -> None:
    """Nothing was seen between its tokens: 0 ms would make a server that does not stream the fastest of all."""
    assert tpot(record(1.0, usage=Usage(5, 64))) is None
    metrics = compute([record(1.0, usage=Usage(5, 64))], {"tpot": 1.0})
    assert metrics.tpot_ms is None
    assert metrics.goodput is not None
    assert metrics.goodput.part == 1.0


def test_several_tokens_in_a_chunk_without_counts() -> None:
    """TPOT is right by the usage; ITL stays between chunks, and the figure that tells so is there."""
    pairs = record(1.0, 2.0, 3.0, usage=Usage(5, 6))
    metrics = compute([pairs])
    assert inter_token_latencies(pairs) == [1.0, 1.0]
    assert tpot(pairs) == pytest.approx(2 / 5)
    assert metrics.tokens_per_chunk == 2.0


def test_several_tokens_in_a_chunk_with_counts() -> None:
    counted = record(1.0, 2.0, 3.0, usage=Usage(5, 6), chunk_tokens=[1, 4, 1])
    assert inter_token_latencies(counted) == [0.25] * 4 + [1.0]


def test_a_chunk_without_a_new_token_is_still_a_gap() -> None:
    assert inter_token_latencies(record(1.0, 2.0, chunk_tokens=[1, 0])) == [1.0]


def test_usage_missing() -> None:
    bare = record(1.0, 1.5, 2.0, asked=128)
    assert output_tokens(bare) == 3
    assert prompt_tokens(bare) == 128
    assert compute([bare]).tokens_from == "chunks"
    assert prompt_tokens(record(1.0, usage=Usage(None, 4), asked=128)) == 128
    assert compute([bare, record(1.0, usage=Usage(5, 1))]).tokens_from == "both"


def test_unknown_prompts_make_no_total() -> None:
    metrics = compute([record(1.0, 1.5), record(1.0, usage=Usage(5, 1))])
    assert metrics.prompt_tokens is None
    assert metrics.total_tokens_per_s is None


def test_failures_count_for_nothing_but_themselves() -> None:
    """A stream cut in the middle has times, but they are no answer's."""
    cut = record(0.1, 0.2, ended=9.0, failure=Failure("truncated", "closed"))
    refused = record(ended=1.0, failure=Failure("http_503", "full"))
    metrics = compute([record(1.0, 2.0, usage=Usage(4, 2)), cut, refused, refused], {"ttft": 5000.0})
    assert (metrics.completed, metrics.failed, metrics.output_tokens) == (1, 3, 2)
    assert metrics.ttft_ms is not None
    assert metrics.ttft_ms.max == pytest.approx(1000)
    assert [(error.kind, error.count, error.first_message) for error in metrics.errors] == [
        ("truncated", 1, "closed"),
        ("http_503", 2, "full"),
    ]
    assert metrics.goodput is not None
    assert metrics.goodput.part == 0.25
    assert metrics.duration_s == 9.0


def test_interrupted_is_not_an_error() -> None:
    stopped = record(ended=1.0, failure=Failure("interrupted", "the run was stopped"))
    metrics = compute([record(1.0, 2.0, usage=Usage(4, 2)), stopped])
    assert (metrics.completed, metrics.failed, metrics.interrupted, metrics.errors) == (1, 0, 1, [])


@pytest.mark.parametrize(
    ("objectives", "good"),
    [
        ({}, True),
        ({"ttft": 1000.0}, True),
        ({"ttft": 999.0}, False),
        ({"tpot": 500.0}, True),
        ({"tpot": 499.0}, False),
        ({"e2e": 2600.0}, True),
        ({"e2e": 2400.0}, False),
        ({"ttft": 1000.0, "tpot": 500.0, "e2e": 100.0}, False),
    ],
)
def test_objectives(objectives: dict[str, float], good: bool) -> None:
    assert meets(record(1.0, 1.5, 2.0, ended=2.5, usage=Usage(1, 3)), objectives) == good


def test_goodput() -> None:
    fast, slow = record(1.0, 2.0, usage=Usage(1, 2)), record(3.0, 4.0, usage=Usage(1, 2))
    metrics = compute([fast, slow], {"ttft": 2000.0})
    assert metrics.goodput is not None
    assert metrics.goodput.requests_per_s == pytest.approx(1 / 4)
    assert metrics.goodput.part == 0.5


def test_send_lag() -> None:
    assert compute([record(2.0, sent=1.25, due=1.0)]).send_lag_ms_max == pytest.approx(250)


def test_nothing_at_all() -> None:
    metrics = compute([], {"ttft": 1.0})
    assert (metrics.completed, metrics.failed, metrics.requests_per_s, metrics.ttft_ms) == (0, 0, 0.0, None)
