"""Weights of single linear layers in the kernels' layouts, packed now or kept from an earlier start."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringserve.engine.calibration import InputSizes
from ringserve.engine.fast_weights import Linear, Source
from ringserve.engine.weight_cache import WeightCache, source_identity
from ringserve.kernels.cpu import linear_bf16, linear_int8
from ringserve.kernels.cpu.aligned import Arena, Zeros, aligned_zeros
from ringserve.kernels.cpu.quantize import input_factors

LAYOUT = 3
"""To be raised whenever the packed form or the way weights are rounded changes."""


def pack_bfloat16(weight: NDArray[np.uint16], bias: NDArray[np.float32] | None, zeros: Zeros) -> Linear:
    """As they are."""
    n, k = weight.shape
    return Linear(n, k, linear_bf16.padded_k(k), False, linear_bf16.pack_bf16(weight, zeros), _padded_bias(n, bias))


def pack_int8(
    weight: NDArray[np.uint16],
    bias: NDArray[np.float32] | None,
    zeros: Zeros,
    input_sizes: NDArray[np.float32] | None,
) -> Linear:
    """Quantised, a scale for each output channel and group of inputs, whose root mean squares are ``input_sizes``."""
    n, k = weight.shape
    floats = (weight.astype(np.uint32) << 16).view(np.float32)
    factors = input_factors(floats, input_sizes)
    packed, scales = linear_int8.pack_int8(*linear_int8.quantize_weight(floats, factors), zeros)
    return Linear(n, k, linear_int8.padded_k(k), True, packed, _padded_bias(n, bias), scales, factors)


def _padded_bias(n: int, bias: NDArray[np.float32] | None) -> NDArray[np.float32]:
    padded: NDArray[np.float32] = aligned_zeros((linear_bf16.padded(n),), np.float32)
    if bias is not None:
        padded[:n] = bias
    return padded


class Packer:
    """Packs layer after layer; what was packed before for the same files and form comes from ``cache``."""

    def __init__(self, quantization: str, source: Path | None, cache: WeightCache | None) -> None:
        """``input_sizes`` may be set before the first call, where nothing was found."""
        self.input_sizes: InputSizes = {}
        self._int8 = quantization == "int8"
        self._arena = Arena()  # layers smaller than a large page share them
        self._cache: WeightCache | None = None
        self._key = ""
        if cache is not None and source is not None:
            with contextlib.suppress(OSError):  # a link to nothing, a file that may not be looked at: nothing is kept
                self._key = json.dumps([source_identity(source), quantization, LAYOUT])
                self._cache = cache
        self._kept: dict[str, NDArray[Any]] | None = self._cache.load(self._key) if self._cache is not None else None
        self._made: dict[str, NDArray[Any]] = {}

    @property
    def found(self) -> bool:
        """Whether an earlier start left its work."""
        return self._kept is not None

    def __call__(self, source: Source) -> Linear:
        """See ``fast_weights.Pack``."""
        if self._kept is not None:
            return self._restored(source.name, source.n, source.k)
        weight, bias, zeros = source.weight(), source.bias(), self._arena.zeros
        if self._int8:
            linear = pack_int8(weight, bias, zeros, self.input_sizes.get(source.module))
        else:
            linear = pack_bfloat16(weight, bias, zeros)
        self._made |= {f"{source.name}.{part}": array for part, array in _arrays(linear).items()}
        return linear

    def keep(self) -> None:
        """Store what was packed for the next start."""
        if self._cache is not None and self._kept is None:
            self._cache.store(self._key, self._made)
        self._made = {}

    def _restored(self, name: str, n: int, k: int) -> Linear:
        assert self._kept is not None
        kept = self._kept
        int8 = f"{name}.scales" in kept
        k_pad = linear_int8.padded_k(k) if int8 else linear_bf16.padded_k(k)
        scales, factors = kept.get(f"{name}.scales"), kept.get(f"{name}.factors")
        return Linear(n, k, k_pad, int8, kept[f"{name}.weight"], kept[f"{name}.bias"], scales, factors)


def _arrays(linear: Linear) -> dict[str, NDArray[Any]]:
    arrays: dict[str, NDArray[Any]] = {"weight": linear.weight, "bias": linear.bias}
    if linear.scales is not None and linear.factors is not None:
        arrays |= {"scales": linear.scales, "factors": linear.factors}
    return arrays
