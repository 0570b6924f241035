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


def quantize_reference(x: NDArray[np.float32]) -> tuple[NDArray[np.int64], Float64]:
    """x ``[m, k]`` -> integers relative to the zero point, -255 .. 255, ``[m, k]``, and each group's scale."""
    m, k = x.shape
    groups = -(-k // GROUP)
    padded = np.zeros((m, groups * GROUP))
    padded[:, :k] = x
    padded = padded.reshape(m, groups, GROUP)
    low, high = np.minimum(padded.min(axis=2), 0.0), np.maximum(padded.max(axis=2), 0.0)
    scale = (high - low) / 255
    scale[high - low < 1e-30] = 0.0
    inverse = np.divide(1.0, scale, out=np.zeros_like(scale), where=scale > 0)
    zero = np.rint(-low * inverse)[:, :, None]
    q = np.clip(np.rint(padded * inverse[:, :, None]) + zero, 0, 255) - zero
    return q.astype(np.int64).reshape(m, -1)[:, :k], scale


def int8_reference(
    q: NDArray[np.int64],
    scales: NDArray[np.floating],
    weight: NDArray[np.int8],
    weight_scale: NDArray[np.float32],
    bias: NDArray[np.float32] | None = None,
) -> Float64:
    """Quantised x ``[m, k]`` with scales ``[m, groups]``, weight ``[n, k]`` with scales ``[n]`` -> ``[m, n]``."""
    k = q.shape[1]
    values = q * np.repeat(scales.astype(np.float64), GROUP, axis=1)[:, :k]
    out: Float64 = values @ weight.T.astype(np.float64) * weight_scale
    return out if bias is None else out + bias
