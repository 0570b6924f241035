"""Residual addition and RMS normalisation in one pass over a row, on GPUs (Triton).

::

    h = round(x + residual)                     residual becomes h; without a residual h = x
    y = round(h / sqrt(mean(h**2) + eps)) * w                  Llama: rounded to x's type before the weight
    y = h / sqrt(mean(h**2) + eps) * (1 + w)                   Gemma (``unit_offset``)

Shapes: x, residual, out ``[T, N]`` of one type with stride 1 in the last dimension; w ``[N]``. Sums in float32. ``out``
may be ``x``. RMSNorm: Zhang and Sennrich, 2019; where the roundings lie follows transformers' modules.
"""

# Triton's decorator is untyped for mypy, and kernel parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, misc, no-any-return, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl


def num_warps(size: int) -> int:
    """For rows of ``size`` elements: at most 64 elements for a thread."""
    return 4 if size < 2048 else 8 if size < 16384 else 16


@triton.jit
def _add_rms_norm(
    x_ptr,
    residual_ptr,
    w_ptr,
    out_ptr,
    eps,
    x_stride,
    residual_stride,
    out_stride,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    used = i < N
    h = tl.load(x_ptr + row * x_stride + i, mask=used, other=0.0).to(tl.float32)
    if ADD:
        h += tl.load(residual_ptr + row * residual_stride + i, mask=used, other=0.0).to(tl.float32)
        rounded = h.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * residual_stride + i, rounded, mask=used)
        h = rounded.to(tl.float32)
    normal = h * tl.rsqrt(tl.sum(h * h, 0) / N + eps)
    w = tl.load(w_ptr + i, mask=used, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        y = normal * (1.0 + w)
    else:
        y = normal.to(out_ptr.dtype.element_ty).to(tl.float32) * w
    tl.store(out_ptr + row * out_stride + i, y.to(out_ptr.dtype.element_ty), mask=used)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    *,
    unit_offset: bool = False,
) -> torch.Tensor:
    """The normalised rows into ``out``, which is returned; ``residual`` becomes the sum."""
    size = x.shape[-1]
    kept = residual if residual is not None else x
    _add_rms_norm[(x.shape[0],)](
        x,
        kept,
        weight,
        out,
        eps,
        x.stride(0),
        kept.stride(0),
        out.stride(0),
        N=size,
        BLOCK=triton.next_power_of_2(size),
        ADD=residual is not None,
        UNIT_OFFSET=unit_offset,
        num_warps=num_warps(size),
    )
    return out


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, unit_offset: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, h) in float64; only h is rounded, to x's type."""
    h = x.double() if residual is None else (x.float() + residual.float()).to(x.dtype).double()
    normal = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return normal * (weight.double() + (1.0 if unit_offset else 0.0)), h
