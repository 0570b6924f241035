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
    """x ``[m, k]`` -> integers -127 .. 127 ``[m, k]`` and a scale for each group of 64 ``[m, groups]``."""
    m, k = x.shape
    groups = -(-k // GROUP)
    padded = np.zeros((m, groups * GROUP))
    padded[:, :k] = x
    padded = padded.reshape(m, groups, GROUP)
    largest = np.abs(padded).max(axis=2)
    largest[largest < 1e-30] = 0.0
    inverse = np.divide(127.0, largest, out=np.zeros_like(largest), where=largest > 0)
    q = np.rint(padded * inverse[:, :, None]).astype(np.int64).reshape(m, -1)
    return q[:, :k], largest / 127.0


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
