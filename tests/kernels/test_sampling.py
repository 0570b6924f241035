"""Drawing against the float64 reference, top-k against a sort, log probabilities against float64."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from ringserve.kernels.logprobs import MINUS_INFINITY, row_logprobs
from ringserve.kernels.sampling import clean, draw
from ringserve.kernels.sampling_reference import draw_reference
from ringserve.kernels.top_k import top_k_ids

TOLERANCE = 1e-5


def _rows(rng: np.random.Generator, size: int) -> list[NDArray[np.float32]]:
    """Rows of different shapes: normal, peaked, with many ties, flat, mostly hidden."""
    normal = rng.standard_normal(size) * 3
    peaked = rng.standard_normal(size) * 2
    peaked[rng.integers(size, size=5)] += 12
    ties = rng.integers(-4, 5, size=size) * 1.5
    hidden = np.where(rng.random(size) < 0.9, -np.inf, normal)
    hidden[rng.integers(size)] = 1.0
    return [row.astype(np.float32) for row in (normal, peaked, ties, np.zeros(size), hidden)]


@pytest.mark.parametrize("size", [1, 2, 100, 1000, 5003])
@pytest.mark.parametrize("top_k", [0, 1, 7, 60, 4000])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.3, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 1.0])
def test_draws_what_the_reference_draws(size: int, top_k: int, top_p: float, min_p: float) -> None:
    rng = np.random.default_rng([size, top_k, int(top_p * 1e6), int(min_p * 100)])
    compared = 0
    for row in _rows(rng, size):
        for temperature in (1.0, 0.3, 1.7):
            uniform = float(rng.random())
            expected = draw_reference(row, temperature, top_k, top_p, min_p, uniform)
            if expected.margin > TOLERANCE:
                compared += 1
                assert draw(row, temperature, top_k, top_p, min_p, uniform) == expected.token_id
    assert compared >= 5


@pytest.mark.parametrize("uniform", [0.5 * 2**-24, 0.5, 1 - 0.5 * 2**-24])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_extreme_uniforms_never_draw_a_hidden_token(uniform: float, top_p: float) -> None:
    row = np.full(1000, -np.inf, dtype=np.float32)
    row[[300, 500, 700]] = [0.0, 1.0, 0.5]
    for temperature in (1.0, 1e-4, 1e-45, 100.0):
        assert draw(row, temperature, 0, top_p, 0.0, uniform) in (300, 500, 700)


def test_frequencies_follow_the_distribution() -> None:
    row = np.log(np.array([0.5, 0.25, 0.125, 0.125], dtype=np.float32))
    uniforms = (np.arange(8) + 0.5) / 8
    assert [draw(row, 1.0, 0, 1.0, 0.0, u) for u in uniforms.tolist()] == [0, 0, 0, 0, 1, 1, 2, 3]


def test_top_k_equals_a_stable_sort() -> None:
    rng = np.random.default_rng(5)
    for size in (1, 5, 300, 4096, 20001):
        for row in _rows(rng, size):
            expected = np.argsort(-row, kind="stable")
            for k in (0, 1, 2, 20, 150, size - 1, size, size + 3):
                assert top_k_ids(row, k).tolist() == expected[: max(0, k)].tolist()


def test_logits_of_any_size_are_drawn_without_a_warning() -> None:
    largest = np.finfo(np.float32).max
    row = np.array([-largest, 0.0, largest, largest], dtype=np.float32)
    for temperature in (1.0, 1e-40, 3e38):
        for top_k, top_p, min_p in [(0, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.1)]:
            assert draw(row, temperature, top_k, top_p, min_p, 0.7) == 3
    assert row_logprobs(row, 2, 2).token_ids == [2, 2, 3]
    np.testing.assert_allclose(row_logprobs(row, 2, 0).values, [-np.log(2)], rtol=1e-6)


def test_clean_repairs_what_it_can() -> None:
    nan, inf = np.nan, np.inf
    row = clean(np.array([nan, 1.0, -inf, inf], dtype=np.float32))
    assert row is not None
    assert draw(row, 1.0, 0, 1.0, 0.0, 0.5) == 3
    row = clean(np.array([nan, 1.0, -inf], dtype=np.float32))
    assert row is not None
    assert draw(row, 1.0, 2, 0.5, 0.1, 0.999) == 1
    assert clean(np.array([nan, -inf], dtype=np.float32)) is None


def test_logprobs_are_a_log_softmax() -> None:
    rng = np.random.default_rng(2)
    row = (rng.standard_normal(3000) * 4).astype(np.float32)
    row[[10, 20]] = row.max() + 1
    row[30] = -np.inf
    exact = row.astype(np.float64)
    exact = exact - np.log(np.exp(exact - exact.max()).sum()) - exact.max()
    result = row_logprobs(row, 999, 5)
    order = np.argsort(-row, kind="stable")[:5].tolist()
    assert result.token_ids == [999, *order]
    assert order[:2] == [10, 20]
    np.testing.assert_allclose(result.values, exact[[999, *order]], atol=1e-6)
    assert result.rank == 1 + int((row > row[999]).sum())
    assert row_logprobs(row, 20, 0).rank == 1
    assert row_logprobs(row, 30, 0).values == [MINUS_INFINITY]
    assert row_logprobs(np.full(4, np.nan, dtype=np.float32), 2, 1).values == [MINUS_INFINITY] * 2
