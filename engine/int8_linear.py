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

from ringserve.engine.decoder_weights import InputSizes
from ringserve.engine.linear_team import LinearTeam, layer_call
from ringserve.kernels.cpu.aligned import Arena, Zeros, aligned_zeros
from ringserve.kernels.cpu.linear_bf16 import padded
from ringserve.kernels.cpu.linear_call import VALUES, WORDS
from ringserve.kernels.cpu.linear_int8 import pack_int8, padded_k, quantize_weight
from ringserve.kernels.cpu.quantize import GROUP, SCALE_WORDS, input_factors


class Int8Linear(nn.Module):
    """x ``[..., in]`` -> ``[..., out]`` in x's type (float32 or bfloat16), by a team of threads."""

    def __init__(
        self,
        linear: nn.Linear,
        team: LinearTeam,
        zeros: Zeros = aligned_zeros,
        input_sizes: NDArray[np.float32] | None = None,
    ) -> None:
        """``input_sizes``: root mean squares of the inputs (``calibration``)."""
        super().__init__()
        n, k = self.out_features, self.in_features = linear.out_features, linear.in_features
        self.weight = nn.Parameter(torch.empty_like(linear.weight, device="meta"), requires_grad=False)
        self._team = team
        self._k_pad = padded_k(k)
        weight = linear.weight.detach().float().numpy()
        self._factors = input_factors(weight, input_sizes)
        self._packed, self._scales = pack_int8(*quantize_weight(weight, self._factors), zeros)
        self._bias = padded_bias(linear)
        self._has_bias = linear.bias is not None
        self._call = layer_call(
            n,
            k,
            self._k_pad,
            len(self._packed),
            INT8=1,
            WEIGHT=self._packed.ctypes.data,
            WEIGHT_SCALES=self._scales.ctypes.data,
            BIAS=self._bias.ctypes.data,
            FACTORS=self._factors.ctypes.data,
            LD_WORDS=self._k_pad // GROUP * SCALE_WORDS,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.detach().reshape(-1, self.in_features).float().contiguous()
        m, k, n = len(rows), self.in_features, self.out_features
        out = torch.empty((m, n), dtype=torch.float32)
        values = torch.empty((m, self._k_pad), dtype=torch.int8)
        words = torch.empty((m, self._k_pad // GROUP * SCALE_WORDS), dtype=torch.int32)
        self._call[VALUES], self._call[WORDS] = values.data_ptr(), words.data_ptr()
        self._team.compute(self._call, m, (rows.data_ptr(), k), (out.data_ptr(), n))
        return out.to(x.dtype).reshape(*x.shape[:-1], n)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self._has_bias}"


def quantize_linears(
    model: nn.Module,
    team: LinearTeam,
    input_sizes: InputSizes | None = None,
    progress: Callable[[float], None] = lambda fraction: None,
    leave: nn.Module | None = None,
) -> int:
    """Replace every plain ``nn.Linear`` on the CPU but ``leave``, in place; how many. Modules that only derive from it
    may do more than a product and stay."""
    input_sizes = {} if input_sizes is None else input_sizes
    # Under all its names: a module that is used in two places is quantised once, and replaced twice.
    found = [
        (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], child)
        for name, child in model.named_modules(remove_duplicate=False)
        if name and type(child) is nn.Linear and child is not leave and child.weight.is_cpu
    ]
    count = len(found)
    arena = Arena()
    replaced: dict[int, Int8Linear] = {}
    for done, (parent, name, child) in enumerate(found, start=1):
        if id(child) not in replaced:
            replaced[id(child)] = Int8Linear(child, team, arena.zeros, input_sizes.get(child))
            child.weight = replaced[id(child)].weight  # its memory is free from here on
        setattr(parent, name, replaced[id(child)])
        progress(done / count)
    return count


def padded_bias(linear: nn.Linear) -> NDArray[np.float32]:
    """The layer's bias, or zeros, up to a whole panel."""
    array: NDArray[np.float32] = aligned_zeros((padded(linear.out_features),), np.float32)
    if linear.bias is not None:
        array[: linear.out_features] = linear.bias.detach().float().numpy()
    return array
