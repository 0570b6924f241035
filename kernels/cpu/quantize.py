"""Activations on their way into a linear layer: float32 rows to bfloat16, or to int8 with a scale for each 64.

Called from compiled code for one row; addresses, sizes in elements::

    quantize_row(x, k, k_pad, q, scales)   float32 [k] -> uint8 [k_pad], float32 [k_pad / 64]
    bf16_row(x, k, k_pad, out)             float32 [k] -> bfloat16 [k_pad]

``quantize_row``: scale = max|x| / 127 over the group, ``q = round(x * (127 / max|x|)) + 128`` (nearest, ties to even),
so that ``x ~ (q - 128) * scale``; beyond k the values are zero (q = 128). A group with NaN or infinity gets a NaN or
infinite scale, so that the layer's output shows it; one whose maximum is below 1e-30 counts as zeros.
``bf16_row`` rounds to nearest, ties to even, NaN stays NaN; zeros beyond k.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringserve.kernels.cpu.compiled import compiled
from ringserve.kernels.cpu.llvm import bits_f32, f32_bits, f32_to_bf16, load_f32, store_f32, store_u8, store_u16

GROUP = 64
TINY = np.float32(1e-30)

_ABS = np.int32(0x7FFFFFFF)
_ROUND = np.float32(12582912.0)
"""1.5 * 2**23: adding it leaves the rounded integer in the low bits of a float32."""


@compiled
def quantize_row(x: Any, k: Any, k_pad: Any, q: Any, scales: Any) -> None:
    """See the top of this file."""
    for first in range(0, k_pad, GROUP):
        count = min(GROUP, k - first)
        if count == GROUP:
            _quantize_group(x + 4 * first, GROUP, q + first, scales + first // 16)
        else:
            _quantize_group(x + 4 * first, count, q + first, scales + first // 16)
            for i in range(count, GROUP):
                store_u8(q + first + i, np.uint8(128))


@compiled
def _quantize_group(x: Any, count: Any, q: Any, scale: Any) -> None:
    # The largest magnitude, compared as integers: the order is that of the floats, with infinity and NaN on top.
    top = np.int32(0)
    for i in range(count):
        top = max(top, f32_bits(load_f32(x + 4 * i)) & _ABS)
    largest = bits_f32(top)
    inverse = np.float32(0)
    if largest < TINY:
        largest = np.float32(0)
    else:
        inverse = np.float32(127) / largest
    store_f32(scale, largest / np.float32(127))
    for i in range(count):
        bits = f32_bits(load_f32(x + 4 * i) * inverse + _ROUND)
        store_u8(q + i, np.uint8((bits + 128) & 255))


@compiled
def bf16_row(x: Any, k: Any, k_pad: Any, out: Any) -> None:
    """See the top of this file."""
    for i in range(k):
        store_u16(out + 2 * i, f32_to_bf16(load_f32(x + 4 * i)))
    for i in range(k, k_pad):
        store_u16(out + 2 * i, np.uint16(0))
