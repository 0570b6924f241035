"""Weights of single linear layers in the kernels' layouts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ringserve.engine.fast_weights import Linear
from ringserve.kernels.cpu import linear_bf16, linear_int8
from ringserve.kernels.cpu.aligned import aligned_zeros


def pack_bfloat16(name: str, weight: NDArray[np.uint16], bias: NDArray[np.float32] | None) -> Linear:
    """As they are."""
    n, k = weight.shape
    return Linear(n, k, linear_bf16.padded_k(k), False, linear_bf16.pack_bf16(weight), _padded_bias(n, bias))


def pack_int8(name: str, weight: NDArray[np.uint16], bias: NDArray[np.float32] | None) -> Linear:
    """Quantised, one scale for each output channel."""
    n, k = weight.shape
    floats = (weight.astype(np.uint32) << 16).view(np.float32)
    quantised, scale = linear_int8.quantize_weight(floats)
    packed, corrections = linear_int8.pack_int8(quantised)
    scales = aligned_zeros((linear_bf16.padded(n),), np.float32)
    scales[:n] = scale
    return Linear(n, k, linear_int8.padded_k(k), True, packed, _padded_bias(n, bias), scales, corrections)


def _padded_bias(n: int, bias: NDArray[np.float32] | None) -> NDArray[np.float32]:
    padded: NDArray[np.float32] = aligned_zeros((linear_bf16.padded(n),), np.float32)
    if bias is not None:
        padded[:n] = bias
    return padded
