"""Rotary position embedding of queries and keys, and keys and values into their pages, on GPUs (Triton).

For a token at position ``p`` and the pair ``(a, b)`` of a head's dimensions that angle ``m`` turns (Su et al.,
"RoFormer", 2021)::

    a' = a cos[p, m] - b sin[p, m]          (a, b) = (x[m], x[m + R/2])     halves, as Llama
    b' = b cos[p, m] + a sin[p, m]                   (x[2m], x[2m + 1])     interleaved, as GPT-J

Dimensions from ``R`` on pass unchanged. Queries are turned in place; turned keys, and values, go to slot
``page * page_size + offset`` of the pool, quantised where it has an 8-bit format (``kv_format``). Slot -1 (padding of a
captured graph) writes nothing.

Shapes: q ``[T, H, D]``, k ``[T, KVH, D]``, v ``[T, KVH, Dv]`` (views into one fused projection will do); cos and sin
float32 ``[max_positions, R / 2]``; positions and slot_mapping ``[T]`` int32 or int64; pages ``[pages, KVH, page_size,
dim]``, scales ``[pages, KVH, page_size]``. The last dimension of each has stride 1.
"""

# Triton's decorator is untyped for mypy, and kernel parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, misc, no-any-return, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ringserve.kernels.gpu.kv_format import MAX_CODE, SMALLEST_SCALE, encode_codes, kv_format, page_strides

NUM_WARPS = 1
"""A head is at most a few hundred bytes."""


@triton.jit
def _turn(ptr, cos, sin, m, used, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Offsets and turned values of both dimensions of each pair. A thread has both, so that it may be in place."""
    if INTERLEAVED:
        first, second = 2 * m, 2 * m + 1
    else:
        first, second = m, m + HALF
    a = tl.load(ptr + first, mask=used, other=0.0).to(tl.float32)
    b = tl.load(ptr + second, mask=used, other=0.0).to(tl.float32)
    return first, second, a * cos - b * sin, b * cos + a * sin


@triton.jit
def _scale(largest, MAX: tl.constexpr, SMALLEST: tl.constexpr):
    return tl.maximum(tl.div_rn(largest, MAX), SMALLEST)


@triton.jit(do_not_specialize_on_alignment=["position_ptr", "slot_ptr"])
def _rope_kv_write(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    slot_ptr,
    k_page_ptr,
    v_page_ptr,
    k_scale_ptr,
    v_scale_ptr,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    angle_stride,
    k_page_stride,
    k_page_head_stride,
    k_slot_stride,
    v_page_stride,
    v_page_head_stride,
    v_slot_stride,
    scale_page_stride,
    scale_head_stride,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,  # R / 2
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,  # at least D - R; 0: R = D
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PAGE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FORMAT: tl.constexpr,  # a KVFormat
    MAX: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    m = tl.arange(0, BLOCK_HALF)
    used = m < HALF
    angles = tl.load(position_ptr + token).to(tl.int64) * angle_stride + m
    cos = tl.load(cos_ptr + angles, mask=used, other=0.0)
    sin = tl.load(sin_ptr + angles, mask=used, other=0.0)
    if head < HEADS:
        q = q_ptr + token * q_token_stride + head * q_head_stride
        first, second, a, b = _turn(q, cos, sin, m, used, HALF, INTERLEAVED)
        tl.store(q + first, a.to(q_ptr.dtype.element_ty), mask=used)
        tl.store(q + second, b.to(q_ptr.dtype.element_ty), mask=used)
    else:
        g = head - HEADS
        slot = tl.load(slot_ptr + token).to(tl.int64)
        if slot >= 0:
            page, offset = slot // PAGE, slot % PAGE
            k = k_ptr + token * k_token_stride + g * k_head_stride
            v = v_ptr + token * v_token_stride + g * v_head_stride
            k_out = k_page_ptr + page * k_page_stride + g * k_page_head_stride + offset * k_slot_stride
            v_out = v_page_ptr + page * v_page_stride + g * v_page_head_stride + offset * v_slot_stride
            first, second, a, b = _turn(k, cos, sin, m, used, HALF, INTERLEAVED)
            value_dims = tl.arange(0, BLOCK_DV)
            values = tl.load(v + value_dims, mask=value_dims < DV, other=0.0)
            if FORMAT == 0:
                tl.store(k_out + first, a.to(k_page_ptr.dtype.element_ty), mask=used)
                tl.store(k_out + second, b.to(k_page_ptr.dtype.element_ty), mask=used)
                tl.store(v_out + value_dims, values.to(v_page_ptr.dtype.element_ty), mask=value_dims < DV)
                if BLOCK_REST > 0:
                    rest = 2 * HALF + tl.arange(0, BLOCK_REST)
                    passed = tl.load(k + rest, mask=rest < D, other=0.0)
                    tl.store(k_out + rest, passed.to(k_page_ptr.dtype.element_ty), mask=rest < D)
            else:
                # What a pool of the model's own type would hold is quantised, not what it was rounded from.
                a = a.to(k_ptr.dtype.element_ty).to(tl.float32)
                b = b.to(k_ptr.dtype.element_ty).to(tl.float32)
                values = values.to(tl.float32)
                largest = tl.max(tl.maximum(tl.abs(a), tl.abs(b)), 0)
                if BLOCK_REST > 0:
                    rest = 2 * HALF + tl.arange(0, BLOCK_REST)
                    passed = tl.load(k + rest, mask=rest < D, other=0.0).to(tl.float32)
                    largest = tl.maximum(largest, tl.max(tl.abs(passed), 0))
                k_scale = _scale(largest, MAX, SMALLEST)
                v_scale = _scale(tl.max(tl.abs(values), 0), MAX, SMALLEST)
                tl.store(k_out + first, encode_codes(tl.div_rn(a, k_scale), FORMAT), mask=used)
                tl.store(k_out + second, encode_codes(tl.div_rn(b, k_scale), FORMAT), mask=used)
                if BLOCK_REST > 0:
                    passed = tl.div_rn(passed, k_scale)
                    tl.store(k_out + rest, encode_codes(passed, FORMAT), mask=rest < D)
                values = tl.div_rn(values, v_scale)
                tl.store(v_out + value_dims, encode_codes(values, FORMAT), mask=value_dims < DV)
                scale_at = page * scale_page_stride + g * scale_head_stride + offset
                tl.store(k_scale_ptr + scale_at, k_scale)
                tl.store(v_scale_ptr + scale_at, v_scale)


def rope_kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    *,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    interleaved: bool = False,
) -> None:
    """Turn q in place and write k and v into the pages; see the module for shapes."""
    tokens, heads, dim = q.shape
    _, kv_heads, page_size, value_dim = v_pages.shape
    half = cos.shape[1]
    kind = kv_format(k_pages.dtype)
    k_scales, v_scales = scales if scales is not None else (k_pages, v_pages)  # not looked at
    _rope_kv_write[(tokens, heads + kv_heads)](
        q,
        k,
        v,
        cos,
        sin,
        positions,
        slot_mapping,
        k_pages,
        v_pages,
        k_scales,
        v_scales,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        cos.stride(0),
        *page_strides(k_pages, v_pages, k_scales),
        HEADS=heads,
        D=dim,
        HALF=half,
        BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_REST=triton.next_power_of_2(dim - 2 * half) if dim > 2 * half else 0,
        DV=value_dim,
        BLOCK_DV=triton.next_power_of_2(value_dim),
        PAGE=page_size,
        INTERLEAVED=interleaved,
        FORMAT=int(kind),
        MAX=MAX_CODE.get(kind, 1.0),
        SMALLEST=SMALLEST_SCALE,
        num_warps=NUM_WARPS,
    )


def rope_reference(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """float64 ``[T, heads, D]``: every head of every token turned."""
    out = x.double().clone()
    half = cos.shape[1]
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    a, b = out[..., first].clone(), out[..., second].clone()
    c, s = cos[positions].double()[:, None], sin[positions].double()[:, None]
    out[..., first] = a * c - b * s
    out[..., second] = b * c + a * s
    return out
