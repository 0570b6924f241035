"""Philox4x32-10 inside a kernel, on GPUs (Triton). ``kernels/philox.py`` is the definition and the CPU counterpart."""

# Triton's decorator is untyped for mypy, and kernel parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, misc, no-any-return, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def philox_word(counter_0, counter_1, counter_2, seed):
    """The first uint32 word for the counter (c0, c1, c2, 0) and the two halves of a 64-bit seed as key."""
    c0 = counter_0.to(tl.uint64) & 0xFFFFFFFF
    c1 = counter_1.to(tl.uint64) & 0xFFFFFFFF
    c2 = counter_2.to(tl.uint64) & 0xFFFFFFFF
    c3 = c0 * 0
    key = seed.to(tl.uint64, bitcast=True)
    k0 = key & 0xFFFFFFFF
    k1 = key >> 32
    for _ in tl.static_range(10):
        product_0 = c0 * 0xD2511F53
        product_1 = c2 * 0xCD9E8D57
        c0 = (product_1 >> 32) ^ c1 ^ k0
        c2 = (product_0 >> 32) ^ c3 ^ k1
        c1 = product_1 & 0xFFFFFFFF
        c3 = product_0 & 0xFFFFFFFF
        k0 = (k0 + 0x9E3779B9) & 0xFFFFFFFF
        k1 = (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0.to(tl.uint32)


@triton.jit
def uniform(word):
    """float64, strictly between 0 and 1, of the upper 24 bits."""
    return ((word >> 8).to(tl.float64) + 0.5) * 5.9604644775390625e-08
