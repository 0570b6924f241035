"""Scattered words into a device's memory, on GPUs (Triton): how the host changes what the device keeps.

::

    words[writes[i, 0]] = writes[i, 1]

Shapes: writes ``[n, 2]`` int32, contiguous; words ``[size]`` int32. Addresses are distinct (else one of the values
wins, nobody knows which) and inside the array, which nobody checks.
"""

# Triton's decorator is untyped for mypy, and kernel parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, misc, no-any-return, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024
NUM_WARPS = 4


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["write_ptr"])
def _write_words(write_ptr, word_ptr, count, BLOCK_N: tl.constexpr):
    i = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    used = i < count
    address = tl.load(write_ptr + 2 * i, mask=used, other=0).to(tl.int64)
    value = tl.load(write_ptr + 2 * i + 1, mask=used, other=0)
    tl.store(word_ptr + address, value, mask=used)


def write_words(writes: torch.Tensor, words: torch.Tensor) -> None:
    """See the module. No writes: nothing is launched."""
    count = writes.shape[0]
    if count:
        _write_words[(triton.cdiv(count, BLOCK),)](writes, words, count, BLOCK_N=BLOCK, num_warps=NUM_WARPS)
