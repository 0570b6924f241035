"""Linear layers and the quantisation of their inputs in numpy, straight from the definitions. For tests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

GROUP = 64

Float64 = NDArray[np.float64]


def from_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bfloat16 (as uint16) widened."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def linear_reference(
    x: NDArray[np.float32], weight: NDArray[np.float32], bias: NDArray[np.float32] | None = None
) -> Float64:
    """x ``[m, k]``, weight ``[n, k]``, bias ``[n]`` -> ``[m, n]``, in float64."""
    out: Float64 = x.astype(np.float64) @ weight.T.astype(np.float64)
    return out if bias is None else out + bias


def rotate_reference(x: NDArray[np.floating], factors: NDArray[np.float32]) -> Float64:
    """x ``[m, k]`` with zeros up to whole groups, times ``factors`` ``[k_pad]``, each group's Hadamard transform: sums
    and differences along the six axes of a cube: ``[m, k_pad]``."""
    m, k = x.shape
    padded = np.zeros((m, len(factors)))
    padded[:, :k] = x
    cube = (padded * factors).reshape(-1, *[2] * 6)
    for axis in range(1, 7):
        zero, one = np.take(cube, 0, axis), np.take(cube, 1, axis)
        cube = np.stack([zero + one, zero - one], axis)
    rotated: Float64 = cube.reshape(m, -1)
    return rotated


def quantize_reference(x: NDArray[np.float32], factors: NDArray[np.float32]) -> tuple[NDArray[np.int64], Float64]:
    """x ``[m, k]`` -> scaled, rotated and rounded ``[m, k_pad]``, and each group's scale."""
    groups = rotate_reference(x, factors).reshape(len(x), -1, GROUP)
    largest = np.abs(groups).max(axis=2)
    scale = np.where(largest < 1e-30, 0.0, largest / 127)
    inverse = np.divide(1.0, scale, out=np.zeros_like(scale), where=scale > 0)
    return np.rint(groups * inverse[:, :, None]).astype(np.int64).reshape(len(x), -1), scale


def int8_reference(
    q: NDArray[np.int64],
    scales: NDArray[np.floating],
    weight: NDArray[np.int8],
    weight_scales: NDArray[np.floating],
    bias: NDArray[np.float32] | None = None,
) -> Float64:
    """Quantised x ``[m, k_pad]`` with scales ``[m, groups]``, weight ``[n, k_pad]`` with scales ``[n, groups]`` ->
    ``[m, n]``."""
    values = q.astype(np.float64) * np.repeat(scales.astype(np.float64), GROUP, axis=1)
    weights = weight.astype(np.float64) * np.repeat(weight_scales.astype(np.float64), GROUP, axis=1)
    out: Float64 = values @ weights.T
    return out if bias is None else out + bias
