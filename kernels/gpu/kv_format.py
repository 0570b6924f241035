"""How the KV pool stores an element, on GPUs (Triton).

* ``NATIVE``: in the model's own type (float16, bfloat16, float32 in tests).
* ``INT8``: ``code = round(x / scale)`` in int8, ``scale = max|x| / 127``.
* ``E4M3``: the bits of ``x / scale`` as float8 e4m3fn in uint8, ``scale = max|x| / 448``.

There is one float32 scale for each token and KV head, for keys and values apart: ``[pages, kv_heads, page_size]``, both
with the same strides, the last one 1.

e4m3 is handled as bits, which is exact and compiles for every target (native float8 types do not below sm_89): moved by
seven places the bits are a float16 of 1/256 of the value, subnormal numbers included. The attention kernels multiply
the scores' columns by the keys' scales, and the weights' columns by the values' ones; no element is ever scaled.
e4m3fn: Micikevicius et al., "FP8 formats for deep learning", 2022.
"""

# Triton's decorator is untyped for mypy, and kernel parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, misc, no-any-return, no-untyped-call"

from __future__ import annotations

from enum import IntEnum

import torch
import triton
import triton.language as tl


class KVFormat(IntEnum):
    """See the module."""

    NATIVE = 0
    INT8 = 1
    E4M3 = 2


MAX_CODE = {KVFormat.INT8: 127.0, KVFormat.E4M3: 448.0}
"""The largest magnitude of a code."""

SMALLEST_SCALE = 1e-12
"""Of a row of zeros, so that nothing is divided by zero."""

_INT8: tl.constexpr = tl.constexpr(1)
_E4M3: tl.constexpr = tl.constexpr(2)


def kv_format(dtype: torch.dtype) -> KVFormat:
    """The format of pages of ``dtype``: uint8 holds e4m3 bits."""
    return {torch.int8: KVFormat.INT8, torch.uint8: KVFormat.E4M3}.get(dtype, KVFormat.NATIVE)


def page_strides(k_pages: torch.Tensor, v_pages: torch.Tensor, scales: torch.Tensor) -> tuple[int, ...]:
    """What a kernel is told of the pool, in elements: page, head and slot of keys, the same of values, page and head of
    the scales, for which anything may stand in where there are none."""
    scale_head = scales.stride(1) if scales.dim() > 1 else 0
    return (*k_pages.stride()[:3], *v_pages.stride()[:3], scales.stride(0), scale_head)


@triton.jit
def decode_codes(codes, compute: tl.constexpr, FORMAT: tl.constexpr):
    """Codes as ``compute``, without their scale; of e4m3, 1/256 of the value. Native elements pass."""
    if FORMAT == _INT8:
        return codes.to(tl.float32).to(compute)
    elif FORMAT == _E4M3:
        bits = codes.to(tl.uint16)
        return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32).to(compute)
    else:
        return codes


@triton.jit
def load_scales(pointers, mask, FORMAT: tl.constexpr):
    """float32 scales that make ``decode_codes`` whole."""
    scales = tl.load(pointers, mask=mask, other=0.0)
    if FORMAT == _E4M3:
        scales = scales * 256.0
    return scales


@triton.jit
def round_half_even(x):
    """The nearest whole number of float32 ``|x| < 2**22``: beyond 2**23 a float32 has no fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def encode_codes(x, FORMAT: tl.constexpr):
    """float32 ``x``, at most MAX_CODE in magnitude, as codes, rounded to nearest even."""
    if FORMAT == _INT8:
        return round_half_even(x).to(tl.int8)
    else:
        sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
        magnitude = tl.abs(x)
        # Below 2**-6 a code counts steps of 2**-9, which are a float32's last bit next to 2**14.
        small = (magnitude + 16384.0).to(tl.uint32, bitcast=True) & 0xFF
        # Above, 20 of the 23 fraction bits are rounded away and the exponent's bias goes from 127 to 7.
        bits = magnitude.to(tl.uint32, bitcast=True)
        rounded = bits + 0x7FFFF + ((bits >> 20) & 1)
        large = (rounded >> 20) - (120 << 3)
        code = tl.where(magnitude < 0.015625, small, large)
        # 0x7F is NaN.
        return (tl.where(code > 0x7E, 0x7E, code) | sign).to(tl.uint8)


def quantize_reference(x: torch.Tensor, kind: KVFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of ``x [..., dim]`` and float32 scales ``[...]``, by torch's own conversions."""
    x = x.float()
    scales = (x.abs().amax(-1) / MAX_CODE[kind]).clamp_min(SMALLEST_SCALE)
    scaled = x / scales[..., None]
    if kind is KVFormat.INT8:
        return scaled.round().to(torch.int8), scales
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scales


def dequantize_reference(codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """float64 values of pages in any format."""
    if scales is None:
        return codes.double()
    values = codes if codes.dtype is torch.int8 else codes.view(torch.float8_e4m3fn).float()
    return values.double() * scales.double()[..., None]
