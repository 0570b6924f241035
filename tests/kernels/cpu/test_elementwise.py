"""RMSNorm, rotary embedding, SwiGLU and the vector functions under them, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cpu_attention_cases import rounded
from numba import njit
from numpy.typing import NDArray

from ringserve.kernels.cpu.activation import silu_mul, silu_mul_bfloat16
from ringserve.kernels.cpu.exponentials import exp2, exp2_coarse
from ringserve.kernels.cpu.features import AVX512, PORTABLE, Level, host_level
from ringserve.kernels.cpu.norm import rms_norm, rms_norm_bfloat16
from ringserve.kernels.cpu.rope import rotate
from ringserve.kernels.cpu.vector_memory import load, store

LEVELS = [PORTABLE, AVX512] if host_level() == AVX512 else [PORTABLE]


@njit
def _exp2(x: Any, out: Any) -> None:
    for i in range(0, x.shape[0], 16):
        store(out.ctypes.data + 4 * i, exp2(load(x.ctypes.data + 4 * i)))


@njit
def _exp2_coarse(level: Any, x: Any, out: Any) -> None:
    for i in range(0, x.shape[0], 16):
        store(out.ctypes.data + 4 * i, exp2_coarse(level, load(x.ctypes.data + 4 * i)))


def widened(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def test_exp2() -> None:
    x = np.concatenate([np.linspace(-126, 127, 4096), [-np.inf, np.nan, -1e30, -127.5] * 4]).astype(np.float32)
    out = np.empty_like(x)
    _exp2(x, out)
    assert np.abs(out[:4096] / np.exp2(x[:4096].astype(np.float64)) - 1).max() < 3e-7
    assert out[4096:4100].tolist()[0] == 0.0
    assert np.isnan(out[4097])
    assert out[4098] == out[4099] == 0.0


@pytest.mark.parametrize("level", LEVELS)
def test_exp2_coarse(level: Level) -> None:
    x = np.concatenate([np.linspace(-125, 127, 4096), [-np.inf, np.nan, -1e30, -200.0] * 4]).astype(np.float32)
    out = np.empty_like(x)
    _exp2_coarse(level, x, out)
    assert np.abs(out[:4096] / np.exp2(x[:4096].astype(np.float64)) - 1).max() < 3e-6
    assert np.isnan(out[4097])
    assert max(out[4096], out[4098], out[4099]) < 1e-37


@pytest.mark.parametrize("size", [16, 64, 80, 576, 4096])
def test_rms_norm(size: int) -> None:
    rng = np.random.default_rng(size)
    x, weight = (rng.standard_normal(size, dtype=np.float32) for _ in range(2))
    out, bits = np.empty_like(x), np.empty(size, np.uint16)
    rms_norm(x.ctypes.data, weight.ctypes.data, size, np.float32(1e-5), out.ctypes.data)
    rms_norm_bfloat16(x.ctypes.data, weight.ctypes.data, size, np.float32(1e-5), bits.ctypes.data)
    exact = x.astype(np.float64) / np.sqrt((x.astype(np.float64) ** 2).mean() + 1e-5) * weight
    assert np.abs(out - exact).max() < 1e-6 * np.abs(exact).max()
    assert np.array_equal(widened(bits), rounded(out))


@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128, 256])
def test_rotate(dim: int) -> None:
    rng = np.random.default_rng(dim)
    x, half = rng.standard_normal(dim, dtype=np.float32), dim // 2
    angles = rng.standard_normal(half, dtype=np.float32) * 10
    cos, sin = np.cos(angles), np.sin(angles)
    out = np.empty_like(x)
    rotate(x.ctypes.data, cos.ctypes.data, sin.ctypes.data, dim, out.ctypes.data)
    expected = np.concatenate([x[:half] * cos - x[half:] * sin, x[half:] * cos + x[:half] * sin])
    assert np.array_equal(out, expected)


def test_silu_mul() -> None:
    rng = np.random.default_rng(0)
    gate, up = (rng.standard_normal(96, dtype=np.float32) * 4 for _ in range(2))
    gate[:4] = (-200, 200, -90, 0)
    out, bits = np.empty_like(gate), np.empty(96, np.uint16)
    silu_mul(gate.ctypes.data, up.ctypes.data, 96, out.ctypes.data)
    silu_mul_bfloat16(gate.ctypes.data, up.ctypes.data, 96, bits.ctypes.data)
    wide = gate.astype(np.float64)
    expected = wide / (1 + np.exp(-wide)) * up
    assert np.abs(out - expected).max() < 1e-6 * np.abs(expected).max()
    assert np.array_equal(widened(bits), rounded(out))
