"""The step-time model: what it learns, how fast, and what it does not fall for."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import median, quantiles

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringserve.engine.step_time import GUESS, StepCosts, StepShape, StepTimeModel

CPU = StepCosts(12e-3, 2e-4, 5e-4, 1e-4, 2e-7, 4e-8)
GPU = StepCosts(4e-3, 1e-5, 2e-6, 0.0, 3e-9, 1e-11)


def random_shape(rng: random.Random, prompts: bool = True) -> StepShape:
    rows = [(rng.randint(10, 2000), 1) for _ in range(rng.randint(1, 32))]
    if prompts and rng.random() < 0.3:
        rows.append((rng.choice([0, 256, 1000]), rng.randint(2, 224)))
    return StepShape.of(rows)


def errors(model: StepTimeModel, costs: StepCosts, rng: random.Random) -> list[float]:
    shapes = [random_shape(rng) for _ in range(300)]
    return [abs(model.predict(shape) / costs.predict(shape) - 1) for shape in shapes]


def test_shapes() -> None:
    shape = StepShape.of([(10, 1), (0, 4), (8, 2)])
    assert shape == StepShape(3, 7, 6, 11 + 4 + 10, (1 + 2 + 3 + 4) + (9 + 10))
    assert StepShape.of([(10, 1)]).with_chunk(0, 4).with_chunk(8, 2) == shape
    assert StepShape.of([]).with_chunk(10, 1) == StepShape.of([(10, 1)])


@pytest.mark.parametrize("costs", [CPU, GPU])
def test_it_learns_from_noise_and_outliers(costs: StepCosts) -> None:
    rng = random.Random(1)
    model = StepTimeModel()
    for _ in range(400):
        shape = random_shape(rng)
        slow = rng.uniform(3, 20) if rng.random() < 0.03 else 1.0
        model.observe(shape, costs.predict(shape) * rng.lognormvariate(0, 0.05) * slow)
    found = errors(model, costs, rng)
    assert median(found) < 0.05
    assert quantiles(found, n=20)[-1] < 0.12


def test_few_steps_are_enough_to_be_of_use() -> None:
    rng = random.Random(2)
    model = StepTimeModel()
    assert not model.is_fitted
    for _ in range(12):
        shape = random_shape(rng)
        model.observe(shape, GPU.predict(shape))
    assert model.is_fitted
    assert median(errors(model, GPU, rng)) < 0.3


def test_prompts_are_not_forgotten_while_everything_decodes() -> None:
    rng = random.Random(3)
    model = StepTimeModel()
    for _ in range(200):
        shape = random_shape(rng)
        model.observe(shape, CPU.predict(shape))
    for _ in range(5000):
        shape = random_shape(rng, prompts=False)
        model.observe(shape, CPU.predict(shape))
    assert quantiles(errors(model, CPU, rng), n=20)[-1] < 0.25


def test_a_machine_that_becomes_slower_is_followed() -> None:
    rng = random.Random(4)
    model = StepTimeModel()
    slower = StepCosts(*(3 * cost for cost in (12e-3, 2e-4, 5e-4, 1e-4, 2e-7, 4e-8)))
    for costs in (CPU, slower):
        for _ in range(1500):
            shape = random_shape(rng)
            model.observe(shape, costs.predict(shape))
    assert median(errors(model, slower, rng)) < 0.1


@pytest.mark.parametrize("costs", [CPU, GPU])
@pytest.mark.parametrize("seed", range(5))
def test_short_prompts_say_little_of_long_ones(costs: StepCosts, seed: int) -> None:
    """A noisy machine, decoding and prompts of a few tokens: a chunk far into a long prompt is not taken for a day's
    work, nor for none."""
    rng = random.Random(seed)
    model = StepTimeModel()
    for _ in range(300):
        rows = [(rng.randint(10, 60), 1) for _ in range(rng.randint(1, 32))]
        if rng.random() < 0.2:
            rows = [(0, rng.randint(5, 20)) for _ in range(rng.randint(1, 8))]
        shape = StepShape.of(rows)
        model.observe(shape, costs.predict(shape) * rng.lognormvariate(0, 0.3))
    for large in (StepShape.of([(7000, 256)]), StepShape.of([(3000, 1)] * 32)):
        assert costs.predict(large) / 10 < model.predict(large) < 100 * costs.predict(large)


def test_one_outlier_hardly_moves_it() -> None:
    rng = random.Random(5)
    model = StepTimeModel()
    for _ in range(100):
        shape = random_shape(rng)
        model.observe(shape, CPU.predict(shape) * rng.lognormvariate(0, 0.02))
    shape = random_shape(rng)
    before = model.predict(shape)
    model.observe(shape, 50 * before)
    assert abs(model.predict(shape) / before - 1) < 0.02


def test_known_costs_are_taken_as_fitted() -> None:
    model = StepTimeModel(CPU)
    assert model.is_fitted
    assert model.costs == CPU
    shape = StepShape.of([(100, 1), (0, 200)])
    for _ in range(50):
        model.observe(shape, CPU.predict(shape))
    assert model.predict(shape) == pytest.approx(CPU.predict(shape), rel=1e-6)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(0, 100_000), st.integers(1, 4096)), min_size=1, max_size=8),
            st.floats(1e-7, 1e3),
        ),
        max_size=60,
    )
)
def test_whatever_it_is_told_predictions_stay_sane(steps: list[tuple[list[tuple[int, int]], float]]) -> None:
    """Never negative, never not a number, and more work never takes less time."""
    model = StepTimeModel()
    for rows, seconds in steps:
        model.observe(StepShape.of(rows), seconds)
    small = StepShape.of([(10, 1)])
    large = small.with_chunk(100, 50)
    assert 0 <= model.predict(small) <= model.predict(large) < 1e6
    assert model.num_observations == len(steps)


def test_no_time_at_all_is_no_measurement() -> None:
    model = StepTimeModel()
    model.observe(StepShape.of([(1, 1)]), 0.0)
    assert model.num_observations == 0
    assert model.costs == GUESS


def test_rates() -> None:
    assert CPU.decode_rate(8, 8000) == pytest.approx(8 / (12e-3 + 8 * 7e-4 + 8000 * 2e-7))
    free = replace(CPU, per_pair=0.0, per_context_token=0.0)
    alone = free.prefill_rate(100, 0, StepShape(0, 0))
    assert alone == pytest.approx(100 / (12e-3 + 2e-4 + 100 * 6e-4))
    assert free.prefill_rate(100, 0, StepShape(8, 8)) < alone
