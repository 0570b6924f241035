"""RMS normalisation of the heads of queries and keys, in place, on GPUs (Triton).

::

    x = round(x / sqrt(mean(x**2) + eps)) * w        for every head of q with w_q, of k with w_k (Qwen3)

Shapes: q ``[T, H, D]`` and k ``[T, KVH, D]``, which may be views into one fused projection, of one type with stride 1
in the last dimension; w_q, w_k ``[D]``. Sums in float32; the roundings are those of transformers' module, as in
``add_rms_norm``, whose reference is this kernel's too.
"""

# Triton's decorator is untyped for mypy, and kernel parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, misc, no-any-return, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

NUM_WARPS = 1
"""A head is at most a few hundred elements."""


@triton.jit
def _normalise(x_ptr, w_ptr, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    used = i < D
    x = tl.load(x_ptr + i, mask=used, other=0.0).to(tl.float32)
    normal = x * tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    w = tl.load(w_ptr + i, mask=used, other=0.0).to(tl.float32)
    y = normal.to(x_ptr.dtype.element_ty).to(tl.float32) * w
    tl.store(x_ptr + i, y.to(x_ptr.dtype.element_ty), mask=used)


@triton.jit
def _head_rms_norm(
    q_ptr,
    k_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if head < HEADS:
        _normalise(q_ptr + token * q_token_stride + head * q_head_stride, q_weight_ptr, eps, D, BLOCK)
    else:
        k = k_ptr + token * k_token_stride + (head - HEADS) * k_head_stride
        _normalise(k, k_weight_ptr, eps, D, BLOCK)


def head_rms_norm(q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float) -> None:
    """Normalise every head of ``q`` and ``k``; see the module for shapes."""
    tokens, heads, dim = q.shape
    _head_rms_norm[(tokens, heads + k.shape[1])](
        q,
        k,
        q_weight,
        k_weight,
        eps,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        HEADS=heads,
        D=dim,
        BLOCK=triton.next_power_of_2(dim),
        num_warps=NUM_WARPS,
    )
