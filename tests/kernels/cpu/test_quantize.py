"""Activations and weights in int8 against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from linear_cases import quantize
from numpy.typing import NDArray

from ringserve.kernels.cpu.linear_bf16 import pack_bf16, padded, padded_k, to_bf16
from ringserve.kernels.cpu.linear_int8 import pack_int8, quantize_weight
from ringserve.kernels.cpu.linear_reference import from_bf16, quantize_reference, rotate_reference
from ringserve.kernels.cpu.quantize import GROUP, LARGEST_FACTOR, SCALE_WORDS, ZERO_WEIGHT, input_factors, rotate_weight


def _factors(k: int, spread: float = 2.0) -> NDArray[np.float32]:
    rng = np.random.default_rng(k)
    sizes = np.exp(rng.uniform(-spread, spread, k)).astype(np.float32)
    return input_factors(rng.standard_normal((9, k)).astype(np.float32), sizes)


def _quantize(x: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32], NDArray[np.int32]]:
    """Values, scales, and what products have too much."""
    q, words = quantize(x, _factors(x.shape[1]))
    return q, words.view(np.float32)[:, ::SCALE_WORDS], words.view(np.int32)[:, 1::SCALE_WORDS]


@pytest.mark.parametrize("k", [1, 63, 64, 65, 576, 1000])
def test_activations(k: int) -> None:
    rng = np.random.default_rng(k)
    x = (rng.standard_normal((12, k)) * np.exp(rng.uniform(-8, 8, (12, 1)))).astype(np.float32)
    x[3] = 0
    x[4] = rng.choice([-1.0, 1.0], k) * 1e-33
    x[5] = np.float32(5e36)
    x[6] = np.abs(x[6])
    x[7] = -np.abs(x[7])
    x[8] = rng.choice([-5e36, 5e36], k)
    x[9] = 100 + rng.random(k)
    x[10, : k // 2] = 0
    q, scales, beginnings = _quantize(x)
    expected, expected_scales = quantize_reference(x, _factors(k))
    np.testing.assert_allclose(scales, expected_scales, rtol=1e-5)
    assert (np.abs(q - expected) <= 1).all()
    assert not scales[3:5].any()
    assert not q[3:5].any()
    assert np.abs(q.astype(np.int64)).max() == 127
    np.testing.assert_array_equal(beginnings, -ZERO_WEIGHT * q.reshape(12, -1, GROUP).sum(axis=2, dtype=np.int32))
    # No rotated value is off by more than half a step and what rounding in float32 adds.
    steps = np.repeat(scales.astype(np.float64), GROUP, axis=1)
    error = np.abs(q * steps - rotate_reference(x, _factors(k)))
    error[4] = 0
    assert (error <= steps * 0.501).all()


def test_one_large_value_leaves_the_others_their_steps() -> None:
    """Rotated, rounded and turned back, an outlier's neighbours are off by a part of what they were without."""
    x = np.random.default_rng(3).standard_normal((50, GROUP)).astype(np.float32)
    x[:, 17] = 60
    factors = input_factors(x)
    q, words = quantize(x, factors)
    # The transform is its own inverse but for a factor of 64.
    turned = q.astype(np.float64) * words.view(np.float32)[:, ::SCALE_WORDS]
    back = rotate_reference(turned, np.ones(GROUP, np.float32)) / GROUP / factors
    error = np.sqrt(np.square(back - x).mean())
    assert error < 0.25 * 60 / 127 / np.sqrt(12)


def test_the_rotation_cancels_out() -> None:
    rng = np.random.default_rng(4)
    for k in (64, 70, 192):
        x, weight = rng.standard_normal((5, k)).astype(np.float32), rng.standard_normal((7, k)).astype(np.float32)
        factors = _factors(k)
        product = rotate_reference(x, factors) @ rotate_weight(weight, factors).T.astype(np.float64)
        np.testing.assert_allclose(product, x.astype(np.float64) @ weight.T, atol=1e-4)


def test_factors_share_sizes_out() -> None:
    """Small for large inputs and small weights; a sign alone where nothing is known or useful."""
    rng = np.random.default_rng(5)
    weight = rng.standard_normal((40, 200)).astype(np.float32)
    weight /= np.linalg.norm(weight, axis=0)
    sizes = np.ones(200, np.float32)
    sizes[3], sizes[4], sizes[5], sizes[6], sizes[7] = 64, 1 / 64, 0, np.inf, np.nan
    weight[:, 8], weight[:, 9], sizes[10] = 0, 1e-44, 1e30
    factors = np.abs(input_factors(weight, sizes))
    np.testing.assert_allclose(factors[[0, 3, 4, 11]], [1, 1 / 8, 8, 1], rtol=1e-6)
    assert (factors[[5, 6, 7, 8, 9, *range(200, 256)]] == 1).all()
    assert factors[10] == 1 / LARGEST_FACTOR
    larger = np.abs(input_factors(weight * np.where(np.arange(200) == 11, 9, 1).astype(np.float32), sizes))
    assert larger[11] == pytest.approx(3, rel=1e-6)
    assert (np.abs(input_factors(weight)) == 1).all()
    assert 20 < (input_factors(weight)[:GROUP] < 0).sum() < 44


def test_factors_make_large_inputs_weights_exact() -> None:
    """The error of a layer some of whose inputs are large is a part of what it is without."""
    rng = np.random.default_rng(6)
    x, weight = rng.standard_normal((40, 256)), rng.standard_normal((30, 256)).astype(np.float32)
    sizes = np.where(np.arange(256) % 20 == 0, 30, 1).astype(np.float32)
    x *= sizes
    errors = []
    for factors in (input_factors(weight), input_factors(weight, sizes)):
        q, bits = quantize_weight(weight, factors)
        rounded = q * np.repeat(from_bf16(bits), GROUP, axis=1)
        errors.append(np.square(rotate_reference(x, factors) @ rounded.T - x @ weight.T).mean())
    assert errors[1] < 0.5 * errors[0]


def test_a_value_does_not_depend_on_the_rows_around_it() -> None:
    x = np.random.default_rng(1).standard_normal((5, 200)).astype(np.float32)
    parts = _quantize(x)
    for row in range(5):
        alone = _quantize(x[row : row + 1])
        for part in range(3):
            np.testing.assert_array_equal(alone[part][0], parts[part][row])


def test_what_is_not_finite_reaches_the_scale() -> None:
    for value in (np.nan, -np.nan, np.inf, -np.inf, 3.4e38):
        x = np.ones((1, 128), np.float32)
        x[0, 70:72] = value
        _, scales, _ = _quantize(x)
        assert np.isfinite(scales[0, 0])
        assert np.isnan(scales[0, 1])


def test_weights() -> None:
    weight = np.random.default_rng(0).standard_normal((70, 130)).astype(np.float32)
    weight[5] = 0
    weight[6, 3] = 40
    factors = _factors(130)
    q, bits = quantize_weight(weight, factors)
    scales = np.repeat(from_bf16(bits), GROUP, axis=1)
    rotated = rotate_weight(weight, factors)
    assert q.shape == rotated.shape
    assert q.min() >= -127
    assert not scales[5].any()
    assert not q[5].any()
    inside = np.abs(q) < 127
    assert (np.abs(q * scales - rotated)[inside] <= scales[inside] * 0.51).all()
    # Not worse than the scale that just reaches the largest.
    largest = np.abs(rotated.reshape(70, -1, GROUP)).max(axis=2)
    plain = np.repeat(largest / 127, GROUP, axis=1)
    inverse = np.divide(1, plain, out=np.zeros_like(plain), where=plain > 0)
    simple = np.square(np.rint(rotated * inverse) * plain - rotated).reshape(70, -1, GROUP).sum(axis=2)
    found = np.square(q * scales - rotated).reshape(70, -1, GROUP).sum(axis=2)
    assert found.sum() < 0.98 * simple.sum()


def test_weights_near_the_smallest_floats() -> None:
    """Rows of tokens that were never trained: no infinity, no warning, nothing that the product would show."""
    weight = np.zeros((4, 64), np.float32)
    weight[:, :3] = np.array([1e-27, 1e-37, 1e-40, 1e-45], np.float32)[:, None]
    factors = input_factors(weight, np.ones(64, np.float32))
    q, bits = quantize_weight(weight, factors)
    assert q.min() >= -127
    np.testing.assert_allclose(q * from_bf16(bits), rotate_weight(weight, factors), atol=1e-30)
    assert np.abs(q[0]).max() >= 120


@pytest.mark.parametrize(("n", "k"), [(48, 64), (100, 128), (1, 64)])
def test_packed_layouts(n: int, k: int) -> None:
    rng = np.random.default_rng(n)
    q = rng.integers(-127, 128, (n, k), dtype=np.int8)
    scale = rng.integers(0, 2**15, (n, k // GROUP), dtype=np.uint16)
    packed, scales = pack_int8(q, scale)
    unpacked = packed.transpose(0, 2, 1, 3).reshape(padded(n), -1).astype(np.int64) - ZERO_WEIGHT
    np.testing.assert_array_equal(unpacked[:n], q)
    assert not unpacked[n:].any()
    columns = scales.transpose(0, 2, 1).reshape(padded(n), -1)
    np.testing.assert_array_equal(columns[:n], scale)
    assert not columns[n:].any()
    bits = rng.integers(0, 2**16, (n, k), dtype=np.uint16)
    rows = pack_bf16(bits).transpose(0, 2, 1, 3).reshape(padded(n), padded_k(k))
    np.testing.assert_array_equal(rows[:n, :k], bits)
    assert not rows[n:].any()
    assert not rows[:, k:].any()


def test_rounding_to_bfloat16() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -3.14159, 3.3e38, 0.0, -0.0, 1e-40], np.float32)
    back = from_bf16(to_bf16(values))
    np.testing.assert_array_equal(back[:3], np.array([1.0, 1.0, 1.015625], np.float32))  # ties to even
    assert np.abs(back[3] - values[3]) <= 2**-7
    np.testing.assert_array_equal(np.signbit(back), np.signbit(values))
