"""int8 keys and values in the pages of the KV pool, in the order in which attention's products read them.

A token's head is ``dim`` codes and one float32 scale: ``code = round(x / scale)``, ``scale = max|x| / 127``
(``kernels/kv_codes.py`` has the definition). A (page, kv head) is a run of ``page_size * dim`` bytes; inside it

    keys    [token / 16, dim / 4, 16 tokens, 4]   four neighbouring dimensions of a token side by side, code + 128
    values  [token / 4, dim, 4]                   four neighbouring tokens of a dimension side by side, code

so that one instruction multiplies bytes without a sign (keys, weights) by bytes with one (queries, values) and adds up
four products for each of 16 tokens (or dimensions). Scales: ``[page, kv head, page_size]``, as everywhere.

What was not written may hold anything: its codes are multiplied by zero, its scales are not used. A token is written
byte by byte, so tokens that lie side by side may be written by several threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringserve.kernels.cpu.codes import larger_or_nan, largest_or_nan, store_biased, store_int8
from ringserve.kernels.cpu.compiled import compiled
from ringserve.kernels.cpu.llvm import load_i8, load_i32, store_f32, store_i8, store_i32
from ringserve.kernels.cpu.vector import absolute, broadcast, divide
from ringserve.kernels.cpu.vector_memory import load

MAX_CODE = 127.0
SMALLEST_SCALE = 1e-12
"""Of a row of zeros, so that nothing is divided by zero."""


@compiled
def _scale(x: int, dim: int) -> Any:
    largest = broadcast(np.float32(0))
    for i in range(0, dim, 16):
        largest = larger_or_nan(largest, absolute(load(x + 4 * i)))
    scale = largest_or_nan(largest) / np.float32(MAX_CODE)
    # Not max(): a scale of NaN (or infinity) stays, so that attention's result shows it.
    if scale < np.float32(SMALLEST_SCALE):
        return np.float32(SMALLEST_SCALE)
    return scale


@compiled
def write_key_int8(x: int, dim: int, keys: int, scales: int, token: int, scratch: int) -> None:
    """One head's float32 key at ``x`` as token ``token`` of the page at ``keys``, whose scales are at ``scales``;
    ``scratch``: dim bytes."""
    scale = _scale(x, dim)
    store_f32(scales + 4 * token, scale)
    by = broadcast(scale)
    for i in range(0, dim, 16):
        store_biased(scratch + i, divide(load(x + 4 * i), by))
    at = keys + 16 * dim * (token // 16) + 4 * (token % 16)
    for quad in range(dim // 4):
        store_i32(at + 64 * quad, load_i32(scratch + 4 * quad))


@compiled
def write_value_int8(x: int, dim: int, values: int, scales: int, token: int, scratch: int) -> None:
    """One head's float32 value at ``x`` as token ``token`` of the page at ``values``; ``scratch``: dim bytes."""
    scale = _scale(x, dim)
    store_f32(scales + 4 * token, scale)
    by = broadcast(scale)
    for i in range(0, dim, 16):
        store_int8(scratch + i, divide(load(x + 4 * i), by))
    at = values + 4 * dim * (token // 4) + token % 4
    for i in range(dim):
        store_i8(at + 4 * i, load_i8(scratch + i))
