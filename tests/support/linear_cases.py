"""Linear layers of the kernels' two forms, packed and called as compiled code calls them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ringserve.kernels.cpu import linear_bf16, linear_int8
from ringserve.kernels.cpu.aligned import aligned_zeros
from ringserve.kernels.cpu.features import Level
from ringserve.kernels.cpu.linear_bf16 import PANEL, bf16_block, pack_bf16, padded, to_bf16
from ringserve.kernels.cpu.linear_int8 import int8_block, pack_int8, quantize_weight
from ringserve.kernels.cpu.linear_reference import from_bf16, int8_reference, linear_reference
from ringserve.kernels.cpu.quantize import GROUP, SCALE_WORDS, input_factors, quantize_rows

Matrix = NDArray[np.float32]

FILLER = 7.5
"""What outputs hold before: nothing beyond the layer's columns may change it."""


def quantize(x: Matrix, factors: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.uint32]]:
    """x ``[m, k]`` as an int8 layer with ``factors`` reads it: values ``[m, k_pad]``, words ``[m, 2 * groups]``."""
    x = np.ascontiguousarray(x)
    m, k = x.shape
    k_pad = linear_int8.padded_k(k)
    q, words = np.full((m, k_pad), 77, np.int8), np.empty((m, k_pad // GROUP * SCALE_WORDS), np.uint32)
    quantize_rows(x.ctypes.data, m, k, k_pad, factors.ctypes.data, q.ctypes.data, words.ctypes.data)
    return q, words


@dataclass(frozen=True)
class Layer:
    """A random layer; ``compute`` gives ``[m, n]`` of a range of panels, ``reference`` the whole in float64."""

    level: Level
    n: int
    k: int
    int8: bool
    seed: int = 0

    def weight(self) -> Matrix:
        weight = np.random.default_rng([self.n, self.k, self.seed]).standard_normal((self.n, self.k)) * 0.1
        return weight.astype(np.float32)

    def bias(self) -> Matrix:
        return np.random.default_rng(self.n).standard_normal(self.n).astype(np.float32)

    @property
    def panels(self) -> int:
        return padded(self.n) // PANEL

    @cached_property
    def _bf16(self) -> NDArray[np.uint16]:
        return pack_bf16(to_bf16(self.weight()))

    @cached_property
    def _int8(self) -> tuple[NDArray[np.uint8], NDArray[np.uint16]]:
        return pack_int8(*quantize_weight(self.weight(), self._factors))

    @cached_property
    def _factors(self) -> Matrix:
        sizes = np.exp2(np.random.default_rng(self.k).uniform(-3, 3, self.k)).astype(np.float32)
        return input_factors(self.weight(), sizes)

    def inputs(self, m: int) -> Matrix:
        x = np.random.default_rng([m, self.seed]).standard_normal((m, self.k)) * 2
        return from_bf16(to_bf16(x.astype(np.float32)))

    def compute(
        self, x: Matrix, panels: tuple[int, int] | None = None, out: Matrix | None = None, accumulate: bool = False
    ) -> Matrix:
        """Writes into ``out`` (three columns wider than n) and returns it."""
        m = len(x)
        if out is None:
            out = np.full((m, self.n + 3), FILLER, np.float32)
        first, last = panels or (0, self.panels)
        bias: Matrix = aligned_zeros((padded(self.n),), np.float32)
        bias[: self.n] = self.bias()
        target = (out.ctypes.data, out.shape[1], m, self.n, first, last, int(accumulate))
        if self.int8:
            self._compute_int8(x, bias, target)
        else:
            packed = self._bf16
            k_pad = linear_bf16.padded_k(self.k)
            rows: NDArray[np.uint16] = aligned_zeros((m, k_pad), np.uint16)
            rows[:, : self.k] = to_bf16(x)
            bf16_block(self.level, packed.ctypes.data, bias.ctypes.data, rows.ctypes.data, k_pad, k_pad, *target)
        return out

    def _compute_int8(self, x: Matrix, bias: Matrix, target: tuple[int, int, int, int, int, int, int]) -> None:
        k_pad = linear_int8.padded_k(self.k)
        packed, scales = self._int8
        q, xscale = quantize(x, self._factors)
        int8_block(
            self.level,
            packed.ctypes.data,
            scales.ctypes.data,
            bias.ctypes.data,
            q.ctypes.data,
            k_pad,
            xscale.ctypes.data,
            xscale.shape[1],
            k_pad,
            *target,
        )

    def reference(self, x: Matrix) -> NDArray[np.float64]:
        if not self.int8:
            return linear_reference(x, from_bf16(to_bf16(self.weight())), self.bias())
        weight, scales = quantize_weight(self.weight(), self._factors)
        q, xscale = quantize(x, self._factors)
        steps = xscale.view(np.float32)[:, ::SCALE_WORDS]
        return int8_reference(q.astype(np.int64), steps, weight, from_bf16(scales), self.bias())
