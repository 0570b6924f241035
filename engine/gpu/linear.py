"""Linear layers on a device: plain, or with 8-bit weights.

8-bit weights have one scale for each output (``kernels/gpu/quantized_linear``). Few rows go through its kernel, which
reads a weight once for ``MAX_ROWS`` of them; up to ``MOST_ROWS`` it runs several times, which still moves fewer bytes
than a matrix product would after writing the whole weight out; beyond that the weight is written out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.nn.functional import linear

from ringserve.kernels.gpu.architecture import Architecture
from ringserve.kernels.gpu.kv_format import KVFormat
from ringserve.kernels.gpu.quantized_linear import (
    CONFIGS,
    MAX_ROWS,
    choose_splits,
    linear_scratch,
    quantize_weight,
    quantized_linear,
)

MOST_ROWS = 4 * MAX_ROWS
"""A weight byte is read four times at most; written out in 16 bits it is read once, written twice and read twice."""

QUANTISED_ROWS = 4096
"""Outputs quantised at a time: their float32 copy is what quantising takes beside the weight."""


class DeviceLinear(Protocol):
    """``x [M, K]`` -> ``[M, N]`` in x's type."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class PlainLinear:
    """Weights in the model's type."""

    weight: torch.Tensor
    """[N, K]."""
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


@dataclass
class Scratch:
    """float32 memory that all layers of a model share: they run one after the other."""

    memory: torch.Tensor

    def fit(self, other: torch.Tensor) -> None:
        """Be at least as large as ``other``, which becomes free."""
        if other.numel() > self.memory.numel():
            self.memory = other


class QuantizedLinear:
    """Weights in int8, or e4m3."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        kind: KVFormat,
        architecture: Architecture,
        num_multiprocessors: int,
        scratch: Scratch,
    ) -> None:
        outputs, inputs = weight.shape
        parts = [quantize_weight(part, kind) for part in torch.split(weight, QUANTISED_ROWS)]
        self.codes = torch.cat([codes for codes, _ in parts])
        self.scales = torch.cat([scales for _, scales in parts])
        self.bias = bias
        self._kind = kind
        self._config = CONFIGS[architecture]
        self._splits = choose_splits(inputs, outputs, num_multiprocessors, self._config)
        self._scratch = scratch
        scratch.fit(linear_scratch(MAX_ROWS, outputs, self._splits, weight.device))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > MOST_ROWS:
            return linear(x, self._written_out(x.dtype), self.bias)
        out = torch.empty(len(x), len(self.codes), dtype=x.dtype, device=x.device)
        for start in range(0, len(x), MAX_ROWS):
            part = slice(start, start + MAX_ROWS)
            quantized_linear(
                x[part],
                self.codes,
                self.scales,
                self.bias,
                out[part],
                self._scratch.memory,
                self._splits,
                self._config,
            )
        return out

    def _written_out(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight in ``dtype``; codes are exact in any of the types, the product is rounded once."""
        codes = self.codes.view(torch.float8_e4m3fn) if self._kind is KVFormat.E4M3 else self.codes
        return codes.to(dtype).mul_(self.scales[:, None])


class QuantizedModule(nn.Module):
    """In the place of a plain ``nn.Linear`` of transformers' code."""

    def __init__(self, quantized: QuantizedLinear, plain: nn.Linear) -> None:
        super().__init__()
        self._linear = quantized
        self.in_features, self.out_features = plain.in_features, plain.out_features
        # Modelling code asks weights for their type.
        self.weight = nn.Parameter(torch.empty_like(plain.weight, device="meta"), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


def quantise_modules(
    model: nn.Module,
    quantise: Callable[[torch.Tensor, torch.Tensor | None], QuantizedLinear],
    progress: Callable[[float], None],
) -> None:
    """Replace every plain ``nn.Linear`` in place. Modules that only derive from it may do more than a product and
    stay, as do experts kept in one tensor."""
    # Under all its names: a module that is used in two places is quantised once, and replaced twice.
    found = [
        (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], child)
        for name, child in model.named_modules(remove_duplicate=False)
        if name and type(child) is nn.Linear
    ]
    made: dict[int, QuantizedModule] = {}
    for done, (parent, name, child) in enumerate(found, start=1):
        if id(child) not in made:
            made[id(child)] = QuantizedModule(
                quantise(child.weight.data, None if child.bias is None else child.bias.data), child
            )
            child.weight = made[id(child)].weight  # its memory is free from here on
        setattr(parent, name, made[id(child)])
        progress(done / len(found))
