"""The benchmarks of the scheduler run, and say what they should; how long anything takes is not asked here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringserve.bench import scheduler_cost
from ringserve.bench.long_prompt import Case
from ringserve.bench.prefix_cost import Counter


def test_every_policy_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "cost.json"
    words = ["--sequences", "8", "--contexts", "20", "40", "--steps", "30", "--output", str(output)]
    assert scheduler_cost.main(words) == 0
    found = json.loads(output.read_text())
    names = {"context 20", "context 40", "priority", "deadline", "fair", "without prefix cache"}
    assert set(found["medians"]) == names
    for medians in found["medians"].values():
        assert set(medians) == {"schedule", "update", "outputs"}
    assert "prefix cache, nothing hits" in capsys.readouterr().out


def test_subjects_decode_everything_in_each_step() -> None:
    subject = scheduler_cost.Subject(6, 33, 16)
    for _ in range(40):
        message = subject.step()
        assert len(message.slots) == 4 * 6
    assert len(subject.seconds["schedule"]) == 40
    assert subject.scheduler.check_integrity() == []


def test_calls_within_calls_are_counted_once() -> None:
    counter = Counter()
    inner = counter.wrap(lambda: 1)
    outer = counter.wrap(lambda: inner() + inner())
    assert outer() == 2
    assert counter.calls == 1


def test_a_case_is_summed_up_by_its_medians() -> None:
    case = Case(
        ["--x"],
        base_p50_ms=[10, 10, 10],
        base_p99_ms=[20, 10, 12],
        with_prompt_p50_ms=[20, 20, 20],
        with_prompt_p99_ms=[24, 30, 20],
        with_prompt_max_ms=[30, 40, 30],
        ttft_alone_s=[2, 1, 3],
        ttft_among_streams_s=[5, 4, 6],
        other_cores=[0, 0, 0],
    )
    summary = case.summary()
    assert (summary["p99_itl_ratio"], summary["ttft_ratio"]) == (2.0, 2.5)
    assert summary["flags"] == ["--x"]
    assert summary["base_p99_ms"] == [20, 10, 12]
