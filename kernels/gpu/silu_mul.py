"""The gate of a SwiGLU feed-forward layer, on GPUs (Triton).

``out = silu(gate) * up`` with ``silu(x) = x / (1 + exp(-x))`` (Shazeer, "GLU variants improve Transformer", 2020).

Shapes: gate_up ``[T, 2 N]``, the output of one fused projection, gate first; out ``[T, N]``; stride 1 in the last
dimension. Computed in float32.
"""

# Triton's decorator is untyped for mypy, and kernel parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, misc, no-any-return, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024
NUM_WARPS = 4


@triton.jit
def _silu_mul(in_ptr, out_ptr, in_stride, out_stride, N: tl.constexpr, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    used = i < N
    gate = tl.load(in_ptr + row * in_stride + i, mask=used, other=0.0).to(tl.float32)
    up = tl.load(in_ptr + row * in_stride + N + i, mask=used, other=0.0).to(tl.float32)
    tl.store(
        out_ptr + row * out_stride + i, (gate / (1.0 + tl.exp(-gate)) * up).to(out_ptr.dtype.element_ty), mask=used
    )


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Into ``out``, which is returned."""
    rows, size = out.shape
    block = min(BLOCK, triton.next_power_of_2(size))
    _silu_mul[(rows, triton.cdiv(size, block))](
        gate_up, out, gate_up.stride(0), out.stride(0), N=size, BLOCK_N=block, num_warps=NUM_WARPS
    )
    return out


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """In float64."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
