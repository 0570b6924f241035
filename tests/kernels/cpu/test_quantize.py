"""Activations and weights in int8 against their definitions."""

from __future__ import annotations

import numpy as np
import pytest

from ringserve.kernels.cpu.linear_bf16 import pack_bf16, padded, padded_k, to_bf16
from ringserve.kernels.cpu.linear_int8 import pack_int8, quantize_weight
from ringserve.kernels.cpu.linear_reference import from_bf16, quantize_reference
from ringserve.kernels.cpu.quantize import GROUP, quantize_rows


@pytest.mark.parametrize("k", [1, 63, 64, 65, 576, 1000])
def test_activations(k: int) -> None:
    rng = np.random.default_rng(k)
    x = (rng.standard_normal((9, k)) * np.exp(rng.uniform(-8, 8, (9, 1)))).astype(np.float32)
    x[3] = 0
    x[4] = rng.choice([-1.0, 1.0], k) * 1e-31
    x[5] = np.float32(3.4e38)
    k_pad = -(-k // GROUP) * GROUP
    q, scales = np.full((9, k_pad), 77, np.uint8), np.empty((9, k_pad // GROUP), np.float32)
    quantize_rows(x.ctypes.data, 9, k, k_pad, q.ctypes.data, scales.ctypes.data)
    expected, expected_scales = quantize_reference(x)
    np.testing.assert_allclose(scales, expected_scales, rtol=1e-6)
    # A value in the middle between two steps may go either way.
    steps = np.repeat(expected_scales, GROUP, axis=1)[:, :k]
    exact = np.divide(x, steps, out=np.zeros(x.shape), where=steps > 0)
    clear = (np.abs(exact - np.floor(exact) - 0.5) > 1e-4) | (expected == 0)
    difference = q[:, :k].astype(np.int64) - 128 - expected
    assert not difference[clear].any()
    assert (np.abs(difference) <= 1).all()
    assert (q[:, k:] == 128).all()
    assert (q >= 1).all()
    assert not scales[3:5].any()


def test_what_is_not_finite_reaches_the_scale() -> None:
    for value in (np.nan, -np.nan, np.inf, -np.inf):
        x = np.ones((1, 128), np.float32)
        x[0, 70] = value
        q, scales = np.empty((1, 128), np.uint8), np.empty((1, 2), np.float32)
        quantize_rows(x.ctypes.data, 1, 128, 128, q.ctypes.data, scales.ctypes.data)
        assert np.isfinite(scales[0, 0])
        assert not np.isfinite(scales[0, 1])


def test_weights() -> None:
    weight = np.random.default_rng(0).standard_normal((70, 130)).astype(np.float32)
    weight[5] = 0
    q, scale = quantize_weight(weight)
    assert q.min() >= -127
    assert scale[5] == 0
    np.testing.assert_allclose(q * scale[:, None], weight, atol=float(scale.max()) * 0.51)
    assert (np.abs(q).max(axis=1)[np.arange(70) != 5] == 127).all()


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
    np.testing.assert_array_equal(corrections.transpose(0, 2, 1).reshape(padded(n), -1), -128 * sums)
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
