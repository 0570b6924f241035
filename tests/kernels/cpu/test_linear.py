"""bf16 and int8 linear blocks: against float64, and rows that do not depend on what is computed with them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from linear_cases import FILLER, Layer

from ringserve.kernels.cpu.features import AVX512, PORTABLE, Level, host_level
from ringserve.kernels.cpu.linear_bf16 import PANEL

LEVELS: list[Level] = [PORTABLE, *([AVX512] if host_level() == AVX512 else [])]
SHAPES = [
    (960, 576),
    (576, 576),
    (3072, 576),
    (576, 1536),
    (1, 1),
    (47, 63),
    (48, 64),
    (49, 65),
    (100, 77),
    (130, 200),
]
"""(n, k): the default model's, and such as fill neither panels nor groups."""
HEAD = (49152, 576)

pytestmark = [pytest.mark.parametrize("level", LEVELS, ids=str), pytest.mark.parametrize("int8", [False, True])]


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_equals_the_reference(level: Level, int8: bool, n: int, k: int) -> None:
    layer = Layer(level, n, k, int8)
    for m in (1, 2, 3, 8, 33):
        x = layer.inputs(m)
        out = layer.compute(x)
        np.testing.assert_allclose(out[:, :n], layer.reference(x), atol=2e-5 * np.sqrt(k))
        assert (out[:, n:] == FILLER).all()


@pytest.mark.parametrize(("n", "k"), [*SHAPES, HEAD])
def test_a_row_is_the_same_whatever_is_computed_with_it(level: Level, int8: bool, n: int, k: int) -> None:
    layer = Layer(level, n, k, int8)
    x = layer.inputs(256)
    whole = layer.compute(x)
    rng = np.random.default_rng(n)
    for m in range(1, 34):
        rows = rng.permutation(256)[:m]
        np.testing.assert_array_equal(layer.compute(x[rows]), whole[rows], strict=True)


def test_panels_may_be_computed_apart(level: Level, int8: bool) -> None:
    layer = Layer(level, 5 * PANEL - 7, 192, int8)
    x = layer.inputs(11)
    whole = layer.compute(x)
    for cuts in ([0, 5], [0, 1, 2, 3, 4, 5], [0, 2, 5], [0, 4, 5]):
        out = np.full_like(whole, FILLER)
        for first, last in reversed(list(itertools.pairwise(cuts))):
            untouched = out.copy()
            layer.compute(x, (first, last), out)
            outside = np.r_[0 : first * PANEL, min(last * PANEL, layer.n) : out.shape[1]]
            np.testing.assert_array_equal(out[:, outside], untouched[:, outside])
        np.testing.assert_array_equal(out, whole)


@pytest.mark.parametrize(("n", "k"), [(96, 64), (100, 77)])
def test_accumulates_into_a_residual(level: Level, int8: bool, n: int, k: int) -> None:
    layer = Layer(level, n, k, int8)
    x = layer.inputs(13)
    plain = layer.compute(x)
    residual = np.random.default_rng(0).standard_normal(plain.shape).astype(np.float32)
    out = layer.compute(x, out=residual.copy(), accumulate=True)
    np.testing.assert_array_equal(out[:, :n], residual[:, :n] + plain[:, :n])
    np.testing.assert_array_equal(out[:, n:], residual[:, n:])


def test_a_broken_input_shows_in_its_row_alone(level: Level, int8: bool) -> None:
    layer = Layer(level, 60, 200, int8)
    x = layer.inputs(9)
    good = layer.compute(x)
    for value in (np.nan, np.inf, -np.inf):
        broken = x.copy()
        broken[4, 130] = value
        out = layer.compute(broken)
        assert not np.isfinite(out[4, :60]).any()
        np.testing.assert_array_equal(np.delete(out, 4, axis=0), np.delete(good, 4, axis=0))
