"""Weights of single linear layers in the kernels' layouts, packed now or kept from an earlier start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringserve.engine.decoder_weights import Linear, Source
from ringserve.engine.kept_weights import KeptWeights
from ringserve.kernels.cpu import linear_bf16, linear_int8
from ringserve.kernels.cpu.aligned import Arena, Zeros, aligned_zeros


def pack_bfloat16(weight: NDArray[np.uint16], bias: NDArray[np.float32] | None, zeros: Zeros) -> Linear:
    """As they are."""
    n, k = weight.shape
    return Linear(n, k, linear_bf16.padded_k(k), False, linear_bf16.pack_bf16(weight, zeros), _padded_bias(n, bias))


def pack_int8(weight: NDArray[np.uint16], bias: NDArray[np.float32] | None, zeros: Zeros) -> Linear:
    """Quantised, one scale for each output channel."""
    n, k = weight.shape
    floats = (weight.astype(np.uint32) << 16).view(np.float32)
    quantised, scale = linear_int8.quantize_weight(floats)
    packed, corrections = linear_int8.pack_int8(quantised, zeros)
    scales = aligned_zeros((linear_bf16.padded(n),), np.float32)
    scales[:n] = scale
    return Linear(n, k, linear_int8.padded_k(k), True, packed, _padded_bias(n, bias), scales, corrections)


def _padded_bias(n: int, bias: NDArray[np.float32] | None) -> NDArray[np.float32]:
    padded: NDArray[np.float32] = aligned_zeros((linear_bf16.padded(n),), np.float32)
    if bias is not None:
        padded[:n] = bias
    return padded


class Packer:
    """Packs layer after layer, or gives what an earlier start has packed."""

    def __init__(self, quantization: str, kept: KeptWeights | None = None) -> None:
        self._pack = pack_int8 if quantization == "int8" else pack_bfloat16
        self._arena = Arena()  # layers smaller than a large page share them
        self._kept = kept
        self._made: dict[str, NDArray[Any]] = {}

    @property
    def found(self) -> bool:
        """Whether an earlier start left its work."""
        return self._kept is not None and self._kept.entry is not None

    def __call__(self, source: Source) -> Linear:
        """See ``decoder_weights.Pack``."""
        if self._kept is not None and self._kept.entry is not None:
            return restored(self._kept.entry.arrays, source.name, source.n, source.k)
        linear = self._pack(source.weight(), source.bias(), self._arena.zeros)
        self._made |= {f"{source.name}.{part}": array for part, array in _arrays(linear).items()}
        return linear

    def keep(self, others: dict[str, NDArray[Any]]) -> int | None:
        """Store what was packed, and the ``others`` that belong to it, for the next start; the checksum of what is kept
        now, None: nothing."""
        made, self._made = self._made, {}
        return None if self._kept is None else self._kept.store(made | others)


def restored(arrays: Mapping[str, NDArray[Any]], name: str, n: int, k: int) -> Linear:
    """A layer from what ``Packer`` has kept. Raises KeyError where it is not there."""
    int8 = f"{name}.scales" in arrays
    k_pad = linear_int8.padded_k(k) if int8 else linear_bf16.padded_k(k)
    scales, corrections = arrays.get(f"{name}.scales"), arrays.get(f"{name}.corrections")
    return Linear(n, k, k_pad, int8, arrays[f"{name}.weight"], arrays[f"{name}.bias"], scales, corrections)


def _arrays(linear: Linear) -> dict[str, NDArray[Any]]:
    arrays: dict[str, NDArray[Any]] = {"weight": linear.weight, "bias": linear.bias}
    if linear.scales is not None and linear.corrections is not None:
        arrays |= {"scales": linear.scales, "corrections": linear.corrections}
    return arrays
