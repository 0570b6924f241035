"""``nn.Linear`` in int8 for models that run through transformers' modules.

Weights are quantised once, a scale for each output channel and group of 64 inputs; activations at every call, a scale
for each token and group (``kernels/cpu/linear_int8.py``). A token's result does not depend on the other tokens
of the call. The weight's plain copy is dropped: ``weight`` stays as a tensor without memory, for code that asks for its
type or shape.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ringserve.engine.calibration import InputSizes
from ringserve.kernels.cpu.aligned import Arena, Zeros, aligned_zeros
from ringserve.kernels.cpu.features import Level
from ringserve.kernels.cpu.linear_bf16 import padded
from ringserve.kernels.cpu.linear_int8 import int8_block, pack_int8, padded_k, quantize_weight
from ringserve.kernels.cpu.quantize import GROUP, SCALE_WORDS, input_factors, quantize_rows


class Int8Linear(nn.Module):
    """x ``[..., in]`` -> ``[..., out]`` in x's type (float32 or bfloat16), on one thread."""

    def __init__(
        self,
        linear: nn.Linear,
        level: Level,
        zeros: Zeros = aligned_zeros,
        input_sizes: NDArray[np.float32] | None = None,
    ) -> None:
        """``input_sizes``: root mean squares of the inputs (``calibration``)."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = nn.Parameter(torch.empty_like(linear.weight, device="meta"), requires_grad=False)
        self._level = level
        weight = linear.weight.detach().float().numpy()
        self._factors = input_factors(weight, input_sizes)
        self._packed, self._scales = pack_int8(*quantize_weight(weight, self._factors), zeros)
        bias = np.zeros(0, np.float32) if linear.bias is None else linear.bias.detach().float().numpy()
        self._bias = _whole_panels(bias, self.out_features)
        self._has_bias = linear.bias is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.detach().reshape(-1, self.in_features).float().contiguous()
        m, k, n, k_pad = len(rows), self.in_features, self.out_features, padded_k(self.in_features)
        out = torch.empty((m, n), dtype=torch.float32)
        quantised = np.empty((m, k_pad), np.int8)
        scales = np.empty((m, k_pad // GROUP * SCALE_WORDS), np.uint32)
        quantize_rows(
            rows.data_ptr(), m, k, k_pad, self._factors.ctypes.data, quantised.ctypes.data, scales.ctypes.data
        )
        int8_block(
            self._level,
            self._packed.ctypes.data,
            self._scales.ctypes.data,
            self._bias.ctypes.data,
            quantised.ctypes.data,
            k_pad,
            scales.ctypes.data,
            scales.shape[1],
            k_pad,
            out.data_ptr(),
            n,
            m,
            n,
            0,
            len(self._packed),
            0,
        )
        return out.to(x.dtype).reshape(*x.shape[:-1], n)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self._has_bias}"


def quantize_linears(
    model: nn.Module,
    level: Level,
    input_sizes: InputSizes | None = None,
    progress: Callable[[float], None] = lambda fraction: None,
) -> int:
    """Replace every plain ``nn.Linear`` on the CPU, in place; how many. Modules that only derive from it may do more
    than a product and stay."""
    input_sizes = {} if input_sizes is None else input_sizes
    # Under all its names: a module that is used in two places is quantised once, and replaced twice.
    found = [
        (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], child)
        for name, child in model.named_modules(remove_duplicate=False)
        if name and type(child) is nn.Linear and child.weight.device.type == "cpu"
    ]
    count = len(found)
    arena = Arena()
    replaced: dict[int, Int8Linear] = {}
    for done, (parent, name, child) in enumerate(found, start=1):
        if id(child) not in replaced:
            replaced[id(child)] = Int8Linear(child, level, arena.zeros, input_sizes.get(child))
            child.weight = replaced[id(child)].weight  # its memory is free from here on
        setattr(parent, name, replaced[id(child)])
        progress(done / count)
    return count


def _whole_panels(values: NDArray[np.float32], n: int = 0) -> NDArray[np.float32]:
    """``values`` and zeros up to a whole panel."""
    array: NDArray[np.float32] = aligned_zeros((padded(max(n, len(values))),), np.float32)
    array[: len(values)] = values
    return array
