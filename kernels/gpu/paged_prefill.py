"""Paged attention of several query tokens for each sequence, on GPUs (Triton): prefill in chunks, with a prefix.

Sequence ``b`` has query rows ``query_start[b] <= r < query_start[b + 1]``, its last ones, and ``n = seq_lens[b]`` keys,
these rows' own included. Row ``r`` has position ``i = n - (query_start[b + 1] - r)``, head ``h`` the KV head ``g``::

    s_j      = softcap(scale * q[r, h] . k_j)      for j <= i and, with a window, i - j < window
    out[r,h] = sum_j exp(s_j) v_j / sum_j exp(s_j)

Shapes: q ``[T, H, D]``; pages, scales and block table as in ``paged_decode``; query_start ``[B + 1]`` int32; seq_lens
``[B]`` int32; out ``[T, H, Dv]``, of which only rows that belong to a sequence are written.

A program computes one block of ``rows_per_block`` consecutive queries of one sequence for all heads of one KV head: its
rows are (query, head of the group) pairs. Which sequence a block belongs to, and where in it, are two arrays made on
the host (``prefill_blocks``), with -1 for blocks that only fill a grid. Only tiles that some row does not see whole, at
the diagonal and at the window's edge, are masked. A sequence's blocks are numbered from its last, which has most keys:
the longest programs start first.

CPU counterpart: ``paged_attention``; reference: ``paged_attention_reference``.
"""

# Triton's decorator is untyped for mypy, and kernel parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, misc, no-any-return, no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ringserve.kernels.gpu.architecture import Architecture
from ringserve.kernels.gpu.attention_tile import LOG2_E, cap_scores, load_keys, load_page_ids, load_values
from ringserve.kernels.gpu.kv_format import kv_format, load_scales, page_strides


@dataclass(frozen=True)
class PrefillConfig:
    """How a device runs the kernel."""

    block_m: int
    """Rows, (query, head) pairs, of a block."""
    block_n: int
    """Keys of a tile."""
    num_warps: int
    num_stages: int

    def rows_per_block(self, group: int) -> int:
        """Queries of a block, where ``group`` heads share a KV head."""
        return self.block_m // group


CONFIGS = {
    (Architecture.LARGE, 1, False): PrefillConfig(block_m=128, block_n=64, num_warps=8, num_stages=3),
    (Architecture.LARGE, 1, True): PrefillConfig(block_m=64, block_n=64, num_warps=8, num_stages=3),
    (Architecture.LARGE, 2, False): PrefillConfig(block_m=128, block_n=64, num_warps=8, num_stages=3),
    (Architecture.LARGE, 2, True): PrefillConfig(block_m=64, block_n=32, num_warps=8, num_stages=3),
    (Architecture.LARGE, 4, False): PrefillConfig(block_m=32, block_n=32, num_warps=4, num_stages=2),
    (Architecture.LARGE, 4, True): PrefillConfig(block_m=16, block_n=16, num_warps=4, num_stages=2),
    (Architecture.COMPACT, 1, False): PrefillConfig(block_m=128, block_n=32, num_warps=8, num_stages=3),
    (Architecture.COMPACT, 1, True): PrefillConfig(block_m=32, block_n=32, num_warps=4, num_stages=3),
    (Architecture.COMPACT, 2, False): PrefillConfig(block_m=128, block_n=32, num_warps=8, num_stages=3),
    (Architecture.COMPACT, 2, True): PrefillConfig(block_m=32, block_n=32, num_warps=4, num_stages=3),
    (Architecture.COMPACT, 4, False): PrefillConfig(block_m=32, block_n=32, num_warps=4, num_stages=2),
    (Architecture.COMPACT, 4, True): PrefillConfig(block_m=16, block_n=16, num_warps=4, num_stages=2),
    (Architecture.CDNA, 1, False): PrefillConfig(block_m=64, block_n=32, num_warps=4, num_stages=2),
    (Architecture.CDNA, 1, True): PrefillConfig(block_m=32, block_n=32, num_warps=4, num_stages=2),
    (Architecture.CDNA, 2, False): PrefillConfig(block_m=64, block_n=32, num_warps=4, num_stages=2),
    (Architecture.CDNA, 2, True): PrefillConfig(block_m=32, block_n=32, num_warps=4, num_stages=2),
    (Architecture.CDNA, 4, False): PrefillConfig(block_m=32, block_n=32, num_warps=4, num_stages=1),
    (Architecture.CDNA, 4, True): PrefillConfig(block_m=16, block_n=16, num_warps=4, num_stages=1),
}
"""By device, bytes of a key's element, and whether heads are wider than 128. Loads are pipelined on sm_80, sm_90 and
sm_100, and nothing spills but a few registers of 8-bit pages (``tests/kernels/gpu`` compiles for them)."""


def prefill_config(architecture: Architecture, k_pages: torch.Tensor, value_dim: int) -> PrefillConfig:
    """For these pages."""
    return CONFIGS[architecture, k_pages.element_size(), max(k_pages.shape[-1], value_dim) > 128]


@dataclass(frozen=True)
class PrefillBlocks:
    """Which block computes what; int32 ``[blocks]`` each."""

    sequences: torch.Tensor
    """-1: padding."""
    offsets: torch.Tensor
    """First query of the block, counted from the sequence's first one in this step."""


def prefill_blocks(query_lens: Sequence[int], rows_per_block: int, pad_to: int = 0) -> PrefillBlocks:
    """Blocks for sequences with so many queries each, on the host; at least ``pad_to`` of them."""
    blocks = [
        (sequence, offset)
        for sequence, length in enumerate(query_lens)
        for offset in reversed(range(0, length, rows_per_block))
    ]
    blocks += [(-1, 0)] * (pad_to - len(blocks))
    columns = torch.tensor(blocks, dtype=torch.int32).view(-1, 2).T.contiguous()
    return PrefillBlocks(columns[0], columns[1])


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["table_ptr", "start_ptr", "length_ptr", "sequence_ptr", "offset_ptr"],
)
def _prefill(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,
    start_ptr,
    length_ptr,
    sequence_ptr,
    offset_ptr,
    out_ptr,
    scale_log2,  # scale * log2(e)
    softcap_log2,  # softcap * log2(e)
    inverse_softcap,  # scale / softcap
    q_row_stride,
    q_head_stride,
    out_row_stride,
    out_head_stride,
    k_page_stride,
    k_head_stride,
    k_slot_stride,
    v_page_stride,
    v_head_stride,
    v_slot_stride,
    scale_page_stride,
    scale_head_stride,
    table_stride,
    GROUP: tl.constexpr,  # query heads of a KV head
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    SOFTCAP: tl.constexpr,
    FORMAT: tl.constexpr,  # a KVFormat
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    b = tl.load(sequence_ptr + tl.program_id(0)).to(tl.int64)
    g = tl.program_id(1)
    if b >= 0:
        offset = tl.load(offset_ptr + tl.program_id(0))
        row_start = tl.load(start_ptr + b)
        num_queries = tl.load(start_ptr + b + 1) - row_start
        n = tl.load(length_ptr + b)
        prefix = n - num_queries

        QUERIES: tl.constexpr = BLOCK_M // GROUP
        rows = tl.arange(0, BLOCK_M)
        dims = tl.arange(0, BLOCK_D)
        value_dims = tl.arange(0, BLOCK_DV)
        columns = tl.arange(0, BLOCK_N)
        query = offset + rows // GROUP
        head = g * GROUP + rows % GROUP
        used = (query < num_queries) & (rows < QUERIES * GROUP)
        row = (row_start + query).to(tl.int64)
        q = tl.load(
            q_ptr + row[:, None] * q_row_stride + head[:, None] * q_head_stride + dims[None, :],
            mask=used[:, None] & (dims < D)[None, :],
            other=0.0,
        )
        own_position = prefix + query
        # Of the block's first and last rows: keys from here on, up to there, are seen by some row ...
        lowest = prefix + offset
        highest = tl.minimum(lowest + QUERIES, n) - 1
        end = highest + 1
        if WINDOW > 0:
            first = tl.maximum(lowest - WINDOW + 1, 0)
        else:
            first = lowest * 0
        start = first // BLOCK_N * BLOCK_N

        table = table_ptr + b * table_stride
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        # Carried from one iteration to the next (``load_page_ids``).
        pages = load_page_ids(table, start + columns, end, PAGE)
        for at in tl.range(start, end, BLOCK_N, num_stages=STAGES):
            position = at + columns
            written = (position >= first) & (position < end)
            slot = position % PAGE
            k_rows = pages * k_page_stride + g * k_head_stride + slot * k_slot_stride
            v_rows = pages * v_page_stride + g * v_head_stride + slot * v_slot_stride
            scale_rows = pages * scale_page_stride + g * scale_head_stride + slot
            pages = load_page_ids(table, position + BLOCK_N, end, PAGE)
            k = load_keys(k_ptr, k_rows, dims, written, q.dtype, D, FORMAT)
            scores = tl.dot(q, k, input_precision=PRECISION)
            if FORMAT != 0:
                scores *= load_scales(k_scale_ptr + scale_rows, written, FORMAT)[None, :]
            scores = cap_scores(scores, scale_log2, softcap_log2, inverse_softcap, SOFTCAP)
            # ... and these by every row.
            if WINDOW > 0:
                partly = (at + BLOCK_N > lowest + 1) | (at < highest - WINDOW + 1)
            else:
                partly = at + BLOCK_N > lowest + 1
            if partly:
                visible = written[None, :] & (position[None, :] <= own_position[:, None])
                if WINDOW > 0:
                    visible &= own_position[:, None] - position[None, :] < WINDOW
                scores = tl.where(visible, scores, float("-inf"))
            # A row may see nothing of a tile yet.
            new_top = tl.maximum(top, tl.max(scores, 1))
            finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
            rescale = tl.exp2(top - finite_top)
            weights = tl.exp2(scores - finite_top[:, None])
            total = total * rescale + tl.sum(weights, 1)
            acc = acc * rescale[:, None]
            v = load_values(v_ptr, v_rows, value_dims, written, q.dtype, DV, FORMAT)
            if FORMAT != 0:
                weights *= load_scales(v_scale_ptr + scale_rows, written, FORMAT)[None, :]
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
            top = new_top
        # Rows without a key are not stored.
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(
            out_ptr + row[:, None] * out_row_stride + head[:, None] * out_head_stride + value_dims[None, :],
            acc.to(out_ptr.dtype.element_ty),
            mask=used[:, None] & (value_dims < DV)[None, :],
        )


def paged_prefill(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    blocks: PrefillBlocks,
    scale: float,
    out: torch.Tensor,
    config: PrefillConfig,
    *,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention of each sequence's newest tokens into ``out``, which is returned; see the module for shapes.

    ``blocks`` lie on the device and were made for the configuration's ``rows_per_block``. Nothing is allocated and
    nothing waits for the device.
    """
    _, heads, key_dim = q.shape
    _, kv_heads, page_size, value_dim = v_pages.shape
    k_scales, v_scales = scales if scales is not None else (k_pages, v_pages)  # not looked at
    cap = softcap if softcap is not None else 1.0
    _prefill[(blocks.sequences.shape[0], kv_heads)](
        q,
        k_pages,
        v_pages,
        k_scales,
        v_scales,
        block_table,
        query_start,
        seq_lens,
        blocks.sequences,
        blocks.offsets,
        out,
        scale * LOG2_E,
        cap * LOG2_E,
        scale / cap,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        *page_strides(k_pages, v_pages, k_scales),
        block_table.stride(0),
        GROUP=heads // kv_heads,
        BLOCK_M=config.block_m,
        D=key_dim,
        BLOCK_D=max(16, triton.next_power_of_2(key_dim)),
        DV=value_dim,
        BLOCK_DV=max(16, triton.next_power_of_2(value_dim)),
        PAGE=page_size,
        BLOCK_N=config.block_n,
        WINDOW=window if window is not None else 0,
        SOFTCAP=softcap is not None,
        FORMAT=int(kv_format(k_pages.dtype)),
        STAGES=config.num_stages,
        # Products of float32 must not go through TF32.
        PRECISION="ieee",
        num_warps=config.num_warps,
    )
    return out
