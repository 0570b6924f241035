"""bfloat16 linear layers with packed weights, for models that run through transformers' modules.

``torch.nn.functional.linear`` reorders a bfloat16 weight at every call. Where the processor has AVX-512 BF16 and no
matrix unit (AMX), the fast path's own layer takes its place (``TeamLinear``); else oneDNN's with weights in its own
layout (``PackedLinear``), which changes no bit of its results. The weight's plain copy is dropped: ``weight`` stays as
a tensor without memory, for code that asks for its type or shape.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ringserve.engine.int8_linear import padded_bias
from ringserve.engine.linear_team import LinearTeam, layer_call
from ringserve.kernels.cpu.aligned import Arena, Zeros
from ringserve.kernels.cpu.features import AVX512, Level
from ringserve.kernels.cpu.linear_bf16 import pack_bf16, padded_k

EXPECTED_ROWS = 8
"""The layout's choice may depend on the rows it is for: those of a decode step."""


class PackedLinear(nn.Module):
    """x ``[..., in]`` -> ``[..., out]``, bfloat16."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = nn.Parameter(torch.empty_like(linear.weight, device="meta"), requires_grad=False)
        self.bias = linear.bias
        mkldnn: Any = torch.ops.mkldnn
        # An opaque tensor: neither a parameter nor a buffer, so that nothing converts or copies it.
        self._packed = mkldnn._reorder_linear_weight(linear.weight.detach(), EXPECTED_ROWS)
        self._linear = mkldnn._linear_pointwise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._linear(x, self._packed, self.bias, "none", [], "")
        return out

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class TeamLinear(nn.Module):
    """x ``[..., in]`` -> ``[..., out]``, bfloat16, by a team of threads: sums in float32, rounded once. A row's result
    does not depend on the other rows."""

    def __init__(self, linear: nn.Linear, team: LinearTeam, zeros: Zeros) -> None:
        super().__init__()
        n, k = self.out_features, self.in_features = linear.out_features, linear.in_features
        self.weight = nn.Parameter(torch.empty_like(linear.weight, device="meta"), requires_grad=False)
        self.bias = linear.bias
        self._team = team
        self._k_pad = padded_k(k)
        self._packed = pack_bf16(linear.weight.detach().contiguous().view(torch.uint16).numpy(), zeros)
        self._padded_bias = padded_bias(linear)
        addresses = {"WEIGHT": self._packed.ctypes.data, "BIAS": self._padded_bias.ctypes.data}
        self._call = layer_call(n, k, self._k_pad, len(self._packed), **addresses)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.detach().reshape(-1, self.in_features).to(torch.bfloat16)
        if self._k_pad > self.in_features:
            rows = nn.functional.pad(rows, (0, self._k_pad - self.in_features))
        rows = rows.contiguous()
        m, n = len(rows), self.out_features
        out = torch.empty((m, n), dtype=torch.float32)
        self._team.compute(self._call, m, (rows.data_ptr(), self._k_pad), (out.data_ptr(), n))
        return out.to(torch.bfloat16).reshape(*x.shape[:-1], n)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def prefers_team(level: Level) -> bool:
    """Whether the team's layers are the faster ones: oneDNN knows AMX, the team's layers do not."""
    cpu: Any = torch.cpu
    return level == AVX512 and not cpu._is_amx_tile_supported()


def can_pack() -> bool:
    """Whether this machine's oneDNN computes in bfloat16."""
    backend: Any = torch.backends.mkldnn
    operators: Any = torch.ops.mkldnn
    return bool(backend.is_available() and operators._is_mkldnn_bf16_supported())


def pack_linears(model: nn.Module, team: LinearTeam | None = None) -> int:
    """Replace every plain bfloat16 ``nn.Linear`` on the CPU, in place, by the ``team``'s layers or oneDNN's; how many.
    Modules that only derive from it may do more than a product and stay."""
    if team is None and not can_pack():
        return 0
    # Under all its names: a module that is used in two places is packed once, and replaced twice.
    found = [
        (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], child)
        for name, child in model.named_modules(remove_duplicate=False)
        if name and type(child) is nn.Linear and child.weight.dtype == torch.bfloat16 and child.weight.is_cpu
    ]
    arena = Arena()
    replaced: dict[int, nn.Module] = {}
    for parent, name, child in found:
        if id(child) not in replaced:
            replaced[id(child)] = PackedLinear(child) if team is None else TeamLinear(child, team, arena.zeros)
        setattr(parent, name, replaced[id(child)])
    return len(found)
