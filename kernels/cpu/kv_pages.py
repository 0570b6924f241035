"""Keys and values in the pages of the KV pool, in the order in which attention's products read them.

A (page, kv head) is a run of ``page_size * dim`` bfloat16, as everywhere; inside it

    keys    [token / 16, dim / 2, 16 tokens, 2]   two neighbouring dimensions of a token side by side
    values  [token / 2, dim, 2]                   two neighbouring tokens of a dimension side by side

so that one instruction takes 16 tokens' (or dimensions') pairs and no sum runs across a register. Writing the first
token of a pair of values sets the second one to zero: what was not written is never multiplied by anything but zero,
and must not be NaN. Tokens of a pair must therefore be written in their order, by one thread.
"""

from __future__ import annotations

from ringserve.kernels.cpu.compiled import compiled
from ringserve.kernels.cpu.llvm import load_i32, store_i32
from ringserve.kernels.cpu.vector_memory import load, store_bfloat16, store_even_half, store_odd_half


@compiled
def write_key(x: int, dim: int, keys: int, token: int, scratch: int) -> None:
    """One head's float32 key at ``x`` as token ``token`` of the page at ``keys``; ``scratch``: 2 * dim bytes."""
    for i in range(0, dim, 16):
        store_bfloat16(scratch + 2 * i, load(x + 4 * i))
    at = keys + 32 * dim * (token // 16) + 4 * (token % 16)
    for pair in range(dim // 2):
        store_i32(at + 64 * pair, load_i32(scratch + 4 * pair))


@compiled
def write_value(x: int, dim: int, values: int, token: int) -> None:
    """One head's float32 value at ``x`` as token ``token`` of the page at ``values``."""
    at = values + (token // 2) * dim * 4
    if token % 2 == 0:
        for i in range(0, dim, 16):
            store_even_half(at + 4 * i, load(x + 4 * i))
    else:
        for i in range(0, dim, 16):
            store_odd_half(at + 4 * i, load(x + 4 * i))
