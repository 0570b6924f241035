"""The curve, its fit and its file."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringserve.engine.step_time import StepShape
from ringserve.options import OptionError
from ringserve.simulate.step_time import (
    Calibration,
    Engine,
    Sample,
    StepTimeCurve,
    fit,
    non_negative_least_squares,
    read_step_time,
    straight_line,
)

CURVE = StepTimeCurve((1, 8, 64), (0.010, 0.011, 0.050), per_sequence=1e-3, per_context_token=1e-6, per_pair=2e-8)


def test_the_formula() -> None:
    assert CURVE.seconds(StepShape(1, 1, 0, 100, 0)) == pytest.approx(0.010 + 1e-3 + 100e-6)
    halfway = CURVE.seconds(StepShape(1, 36, 36, 0, 1000))
    assert halfway == pytest.approx((0.011 + 0.050) / 2 + 1e-3 + 1000 * 2e-8)
    beyond = CURVE.seconds(StepShape(0, 64 + 56, 0, 0, 0))
    assert beyond == pytest.approx(0.050 + 0.039)  # as steep as before the last knot
    assert straight_line(4, 0.5, 2).seconds(StepShape(3, 10, 0, 1000, 0)) == pytest.approx(0.004 + 0.005 + 0.002)


@pytest.mark.parametrize(
    ("knots", "seconds"), [((), ()), ((1, 2), (1.0,)), ((2, 1), (1.0, 1.0)), ((1,), (-1.0,)), ((1, 2), (0.0, 0.0))]
)
def test_curves_that_are_none(knots: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="step-time curve"):
        StepTimeCurve(knots, seconds)


def samples_of(curve: StepTimeCurve, overhead: float) -> list[Sample]:
    shapes = [StepShape(n, n, 0, n * context, 0) for n in (1, 2, 8, 32, 64) for context in (20, 800)]
    found = [Sample((shape,), curve.seconds(shape), False) for shape in shapes]
    for length in (2, 8, 30, 64, 200):
        chunks = tuple(StepShape.of([(start, min(64, length - start))]) for start in range(0, length, 64))
        found.append(Sample(chunks, sum(map(curve.seconds, chunks)) + overhead, True))
    return found


def test_a_fit_finds_the_curve_that_made_the_samples() -> None:
    found = fit(samples_of(CURVE, 0.003), CURVE.knots)
    assert found.step_time.knots == CURVE.knots
    assert found.step_time.knot_seconds == pytest.approx(CURVE.knot_seconds, rel=1e-6)
    for name in ("per_sequence", "per_context_token", "per_pair"):
        assert getattr(found.step_time, name) == pytest.approx(getattr(CURVE, name), rel=1e-5)
    assert found.request_overhead_s == pytest.approx(0.003, rel=1e-6)
    assert max(map(abs, found.errors)) < 1e-8


def test_a_fit_of_noisy_times_is_near_and_never_negative() -> None:
    rng = np.random.default_rng(3)
    noisy = [
        msgspec.structs.replace(sample, seconds=sample.seconds * float(rng.normal(1, 0.05)))
        for _ in range(20)
        for sample in samples_of(CURVE, 0.003)
    ]
    found = fit(noisy, (1, 2, 4, 8, 16, 32, 64))
    assert list(found.step_time.knot_seconds) == sorted(found.step_time.knot_seconds)
    for sample in samples_of(CURVE, 0.003):
        predicted = sum(map(found.step_time.seconds, sample.shapes)) + found.request_overhead_s * sample.with_overhead
        assert predicted == pytest.approx(sample.seconds, rel=0.06)


@pytest.mark.parametrize("samples", [[], [Sample((StepShape(1, 1),), 0.0, False)]])
def test_nothing_to_fit(samples: list[Sample]) -> None:
    with pytest.raises(ValueError, match="fit"):
        fit(samples, (1,))


@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 8))
def test_least_squares_meet_the_conditions_of_an_optimum(seed: int, rows: int, columns: int) -> None:
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(rows, columns)), rng.normal(size=rows)
    x = non_negative_least_squares(matrix, target)
    gradient = matrix.T @ (target - matrix @ x)
    assert (x >= 0).all()
    assert (gradient <= 1e-6).all()  # no coefficient could grow
    assert np.abs(gradient[x > 0]).max(initial=0) <= 1e-6  # none could change


def test_a_calibration_survives_its_file(tmp_path: Path) -> None:
    engine = Engine(100, 16, 8, 64, 512)
    kept = Calibration(CURVE, 0.002, engine, {"url": "here"}, tuple(samples_of(CURVE, 0.0)))
    kept.save(tmp_path / "step.json")
    assert read_step_time(str(tmp_path / "step.json")) == kept


@pytest.mark.parametrize("text", ["linear:", "linear:1", "linear:a:b", "linear:1:2:3:4", "linear:-1:2", "linear:0:0"])
def test_lines_that_are_none(text: str) -> None:
    with pytest.raises(OptionError, match="linear:STEP_MS"):
        read_step_time(text)


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"step_time": {"knots": [1], "knot_seconds": []}}'])
def test_files_that_are_none(content: str, tmp_path: Path) -> None:
    (tmp_path / "step.json").write_text(content)
    with pytest.raises(OptionError, match="not a file of"):
        read_step_time(str(tmp_path / "step.json"))
    with pytest.raises(OptionError, match="No such file"):
        read_step_time(str(tmp_path / "missing.json"))
