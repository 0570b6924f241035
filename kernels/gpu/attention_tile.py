"""What decode and prefill attention do with one tile of keys, on GPUs (Triton).

``rows`` are the offsets of the tile's keys (or values) in the pages, int64 ``[BLOCK_N]``. Products of 8-bit keys want
the tile loaded as it lies and transposed afterwards; native keys are loaded transposed, for free.
"""

# Triton's decorator is untyped for mypy, and kernel parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, misc, no-any-return, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from ringserve.kernels.gpu.kv_format import decode_codes

LOG2_E = 1.4426950408889634


@triton.jit
def load_page_ids(table, position, end, PAGE: tl.constexpr):
    """The pages of these positions, those from ``end`` on in page 0.

    For the next tile, one iteration ahead: loaded where they are used, they would keep the compiler from overlapping
    the loads of keys and values.
    """
    return tl.load(table + position // PAGE, mask=position < end, other=0).to(tl.int64)


@triton.jit
def load_keys(ptr, rows, dims, visible, compute: tl.constexpr, D: tl.constexpr, FORMAT: tl.constexpr):
    """``[BLOCK_D, BLOCK_N]`` in type ``compute``."""
    if FORMAT == 0:
        return tl.load(ptr + rows[None, :] + dims[:, None], mask=visible[None, :] & (dims < D)[:, None], other=0.0)
    else:
        codes = tl.load(ptr + rows[:, None] + dims[None, :], mask=visible[:, None] & (dims < D)[None, :], other=0)
        return tl.trans(decode_codes(codes, compute, FORMAT))


@triton.jit
def load_values(ptr, rows, dims, visible, compute: tl.constexpr, D: tl.constexpr, FORMAT: tl.constexpr):
    """``[BLOCK_N, BLOCK_D]`` in type ``compute``."""
    values = tl.load(ptr + rows[:, None] + dims[None, :], mask=visible[:, None] & (dims < D)[None, :], other=0)
    return decode_codes(values, compute, FORMAT)


@triton.jit
def cap_scores(scores, scale_log2, softcap_log2, inverse_softcap, SOFTCAP: tl.constexpr):
    """Products to base-2 scores: ``scale_log2`` and ``softcap_log2`` are times log2(e), the last is scale / softcap."""
    if SOFTCAP:
        # tanh(y) = 2 / (1 + exp(-2 y)) - 1
        return softcap_log2 * (2.0 / (1.0 + tl.exp(-2.0 * inverse_softcap * scores)) - 1.0)
    else:
        return scores * scale_log2
