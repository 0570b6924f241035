"""The compiled row sampler against the float64 reference, on ordinary and on hostile rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ringserve.kernels.cpu.row_draw import Workspace, best_rows, draw, uniform
from ringserve.kernels.cpu.row_sampler import MOST_LOGPROBS, CpuRowSampler
from ringserve.kernels.logprobs import MINUS_INFINITY, row_logprobs
from ringserve.kernels.philox import philox4x32, uniforms
from ringserve.kernels.row_sampler import Draw, NumpyRowSampler
from ringserve.kernels.sampling_reference import draw_reference

Row = NDArray[np.float32]

TOLERANCE = 1e-5
LARGEST = float(np.finfo(np.float32).max)
SIZES = [1, 2, 31, 33, 257, 5003, 49152]
PARAMETERS = [
    (0, 1.0, 0.0),
    (7, 1.0, 0.0),
    (60, 0.9, 0.0),
    (4000, 0.5, 0.05),
    (10**6, 0.9, 0.0),
    (0, 0.95, 0.0),
    (0, 0.999, 0.0),
    (0, 1e-6, 0.0),
    (0, 1.0, 0.05),
    (0, 1.0, 1.0),
]


def _rows(rng: np.random.Generator, size: int) -> dict[str, Row]:
    normal = rng.standard_normal(size) * 3
    peaked = rng.standard_normal(size) * 2
    peaked[rng.integers(size, size=5)] += 12
    hidden = np.where(rng.random(size) < 0.9, -np.inf, normal)
    hidden[rng.integers(size)] = 1.0
    alone = np.full(size, -np.inf)
    alone[rng.integers(size)] = -3.0
    huge = normal * 1e37
    huge[rng.integers(size)] = np.inf
    broken = normal.copy()
    broken[rng.random(size) < 0.3] = np.nan
    broken[rng.integers(size)] = 2.0
    rows = {
        "normal": normal,
        "peaked": peaked,
        "ties": rng.integers(-4, 5, size=size) * 1.5,
        "flat": np.zeros(size),
        "both zeros": np.where(rng.random(size) < 0.5, 0.0, -0.0),
        "denormal": rng.integers(-3, 4, size=size) * 1e-45,
        "hidden": hidden,
        "alone": alone,
        "huge": huge,
        "NaN": broken,
        "steps": -np.exp2(rng.integers(-140, 120, size=size).astype(np.float64)),
    }
    return {name: row.astype(np.float32) for name, row in rows.items()}


def _draw(space: Workspace, row: Row, temperature: float, top_k: int, top_p: float, min_p: float, number: float) -> int:
    token: int = draw(
        row.ctypes.data,
        len(row),
        temperature,
        top_k,
        top_p,
        min_p,
        number,
        space.x,
        space.weights,
        space.values,
        space.maxima,
        space.ids,
        space.ones,
    )
    return token


@pytest.mark.parametrize("size", SIZES)
def test_draws_what_the_reference_draws(size: int) -> None:
    rng = np.random.default_rng(size)
    space = Workspace(size)
    compared = 0
    for name, row in _rows(rng, size).items():
        exact = np.where(row == np.inf, np.float32(LARGEST), row)
        for top_k, top_p, min_p in PARAMETERS:
            temperature = float(rng.choice([1.0, 0.3, 1.7, 1e-4]))
            number = float(rng.random())
            with np.errstate(invalid="ignore", over="ignore"):
                expected = draw_reference(exact, temperature, top_k, top_p, min_p, number)
            if expected.margin > TOLERANCE:
                compared += 1
                token = _draw(space, row, temperature, top_k, top_p, min_p, number)
                assert token == expected.token_id, (name, top_k, top_p, min_p, temperature, number)
    assert compared >= 60


@pytest.mark.parametrize("number", [0.5 * 2**-24, 0.5, 1 - 0.5 * 2**-24])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_extreme_uniforms_never_draw_a_hidden_token(number: float, top_p: float) -> None:
    row = np.full(1000, -np.inf, dtype=np.float32)
    row[[300, 500, 700]] = [0.0, 1.0, 0.5]
    space = Workspace(1000)
    for temperature in (1.0, 1e-4, 1e-45, 100.0):
        assert _draw(space, row, temperature, 0, top_p, 0.0, number) in (300, 500, 700)


def test_a_draw_leaves_nothing_behind_for_the_next() -> None:
    rng = np.random.default_rng(3)
    used = Workspace(700)
    for row in _rows(rng, 700).values():
        for top_k, top_p, min_p in PARAMETERS:
            arguments = (0.9, top_k, top_p, min_p, float(rng.random()))
            assert _draw(used, row, *arguments) == _draw(Workspace(700), row, *arguments)


def test_the_largest_logit() -> None:
    for size in SIZES:
        rows = list(_rows(np.random.default_rng(size), size).values())
        space, tokens = Workspace(size), np.empty(len(rows), dtype=np.int64)
        best_rows(np.array([row.ctypes.data for row in rows]), size, tokens, space.x, space.maxima)
        cleaned = [np.nan_to_num(row, nan=-np.inf, posinf=LARGEST, neginf=-np.inf) for row in rows]
        assert tokens.tolist() == [int(row.argmax()) for row in cleaned]


def test_uniforms_are_philox() -> None:
    rng = np.random.default_rng(1)
    counters = rng.integers(0, 2**32, (50, 4), dtype=np.uint32)
    keys = rng.integers(0, 2**32, (50, 2), dtype=np.uint32)
    expected = uniforms(philox4x32(counters, keys)[:, 0]).tolist()
    found = [uniform(*counter, *key) for counter, key in zip(counters, keys, strict=True)]
    assert found == expected


def _draws(rows: list[Row]) -> list[Draw]:
    return [
        Draw(row, (0.0, 0.7, 1.3)[i % 3], (0, 20, 0)[i % 3], (1.0, 0.9, 0.6)[i % 3], 0.0, (i, 0, 0, 0), (i * 7, 3))
        for i, row in enumerate(rows)
    ]


def test_both_implementations_agree() -> None:
    size = 3001
    rows = [*_rows(np.random.default_rng(8), size).values(), np.full(size, np.nan, np.float32)]
    compiled, plain = CpuRowSampler(size), NumpyRowSampler()
    together = compiled.draw(_draws(rows))
    assert together == plain.draw(_draws(rows))
    assert together[-1] is None
    assert together == [compiled.draw([entry])[0] for entry in _draws(rows)]
    assert compiled.draw([]) == []


def test_logprobs_equal_the_definition() -> None:
    size = 5003
    rng = np.random.default_rng(4)
    rows = [*_rows(rng, size).values(), np.full(size, np.nan, np.float32)]
    sampler = CpuRowSampler(size)
    for k in (0, 1, 20, MOST_LOGPROBS, MOST_LOGPROBS + 1):
        tokens = [int(token) for token in rng.integers(size, size=len(rows))]
        ks = [k if i % 3 else 0 for i in range(len(rows))]
        for row, token, depth, found in zip(rows, tokens, ks, sampler.logprobs(rows, tokens, ks), strict=True):
            expected = row_logprobs(row, token, depth)
            assert found.token_ids == expected.token_ids
            assert found.rank == expected.rank
            np.testing.assert_allclose(found.values, expected.values, rtol=1e-6, atol=1e-5)
    assert sampler.logprobs([], [], []) == []
    assert sampler.logprobs([rows[-1]], [2], [1])[0].values == [MINUS_INFINITY] * 2


def test_a_row_of_another_shape_is_refused() -> None:
    sampler = CpuRowSampler(8)
    rows: list[Any] = [np.zeros(7, np.float32), np.zeros(8, np.float64), np.zeros(16, np.float32)[::2]]
    for row in rows:
        with pytest.raises(ValueError, match="8 adjacent float32"):
            sampler.logprobs([row], [0], [0])
