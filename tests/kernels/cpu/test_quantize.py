"""Activations and weights in int8 against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from ringserve.kernels.cpu.linear_bf16 import pack_bf16, padded, padded_k, to_bf16
from ringserve.kernels.cpu.linear_int8 import pack_int8, quantize_weight
from ringserve.kernels.cpu.linear_reference import from_bf16, quantize_reference
from ringserve.kernels.cpu.quantize import GROUP, quantize_rows, scale_and_zero


def _quantize(x: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
    x = np.ascontiguousarray(x)
    m, k = x.shape
    k_pad = -(-k // GROUP) * GROUP
    q, scales = np.full((m, k_pad), 77, np.uint8), np.empty((m, k_pad // GROUP), np.uint32)
    quantize_rows(x.ctypes.data, m, k, k_pad, q.ctypes.data, scales.ctypes.data)
    return q, scales


@pytest.mark.parametrize("k", [1, 63, 64, 65, 576, 1000])
def test_activations(k: int) -> None:
    rng = np.random.default_rng(k)
    x = (rng.standard_normal((12, k)) * np.exp(rng.uniform(-8, 8, (12, 1)))).astype(np.float32)
    x[3] = 0
    x[4] = rng.choice([-1.0, 1.0], k) * 1e-31
    x[5] = np.float32(3.4e38)
    x[6] = np.abs(x[6])
    x[7] = -np.abs(x[7])
    x[8] = rng.choice([-3.4e38, 3.4e38], k)
    x[9] = 100 + rng.random(k)
    q, scales = _quantize(x)
    steps, zero = scale_and_zero(scales)
    expected, expected_steps = quantize_reference(x)
    np.testing.assert_allclose(steps, expected_steps, rtol=2**-14)
    values = q.astype(np.int64) - np.repeat(zero, GROUP, axis=1)
    # The zero point moves the steps; no value is off by more than half of one and what rounding adds.
    step = np.repeat(steps.astype(np.float64), GROUP, axis=1)[:, :k]
    error = np.abs(values[:, :k] * step - x)
    error[4] = 0
    assert (error <= step * 0.51).all()
    assert (np.abs(values[:, :k] - expected) <= 1).all()
    assert not values[:, k:].any()
    assert not steps[3:5].any()


def test_a_value_does_not_depend_on_the_rows_around_it() -> None:
    x = np.random.default_rng(1).standard_normal((5, 200)).astype(np.float32)
    q, scales = _quantize(x)
    for row in range(5):
        alone, alone_scales = _quantize(x[row : row + 1])
        np.testing.assert_array_equal(alone[0], q[row])
        np.testing.assert_array_equal(alone_scales[0], scales[row])


def test_what_is_not_finite_reaches_the_scale() -> None:
    for value in (np.nan, -np.nan, np.inf, -np.inf):
        x = np.ones((1, 128), np.float32)
        x[0, 70] = value
        _, scales = _quantize(x)
        steps, _ = scale_and_zero(scales)
        assert np.isfinite(steps[0, 0])
        assert np.isnan(steps[0, 1])


def test_weights() -> None:
    weight = np.random.default_rng(0).standard_normal((70, 130)).astype(np.float32)
    weight[5] = 0
    q, scale = quantize_weight(weight)
    assert q.min() >= -127
    assert scale[5] == 0
    np.testing.assert_allclose(q * scale[:, None], weight, atol=float(scale.max()) * 0.51)
    assert (np.abs(q).max(axis=1)[np.arange(70) != 5] == 127).all()


def test_weights_near_the_smallest_floats() -> None:
    """Rows of tokens that were never trained: no infinity, no warning, nothing that the product would show."""
    weight = np.zeros((4, 64), np.float32)
    weight[:, :3] = np.array([1e-30, 1e-37, 1e-40, 1e-45], np.float32)[:, None]
    q, scale = quantize_weight(weight)
    assert q.min() >= -127
    np.testing.assert_allclose(q * scale[:, None], weight, atol=2e-36)
    assert (q[0, :3] == 127).all()


@pytest.mark.parametrize(("n", "k"), [(48, 64), (100, 77), (1, 1)])
def test_packed_layouts(n: int, k: int) -> None:
    rng = np.random.default_rng(n)
    q = rng.integers(-127, 128, (n, k), dtype=np.int8)
    packed, corrections = pack_int8(q)
    unpacked = packed.transpose(0, 2, 1, 3).reshape(padded(n), -1)
    np.testing.assert_array_equal(unpacked[:n, :k], q)
    assert not unpacked[n:].any()
    assert not unpacked[:, k:].any()
    sums = unpacked.reshape(padded(n), -1, GROUP).sum(axis=2, dtype=np.int64)
    np.testing.assert_array_equal(corrections.transpose(0, 2, 1).reshape(padded(n), -1), sums)
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
