"""Paged attention of one query token for each sequence, on GPUs (Triton).

For sequence ``b`` with ``n = seq_lens[b]`` written keys, head ``h`` of KV head ``g = h // (H / KVH)``::

    s_j    = softcap(scale * q[b, h] . k_j)      for max(0, n - window) <= j < n;  softcap(s) = c * tanh(s / c)
    out    = sum_j exp(s_j) v_j / sum_j exp(s_j)                                   zeros where n = 0

Shapes: q ``[B, H, D]``; k_pages ``[pages, KVH, page_size, D]``; v_pages ``[pages, KVH, page_size, Dv]``; block_table
``[B, max_pages]`` int32; seq_lens ``[B]`` int32; out ``[B, H, Dv]``. The last dimension of each has stride 1; q and out
are float32, float16 or bfloat16, the pages likewise or in an 8-bit format with scales (``kv_format``); sums in float32.
Only positions below ``n`` (and inside the window) are read.

Two stages. The first cuts each sequence into at most SPLITS runs of keys, so that few long sequences still fill the
device; every program computes all heads of one KV head (padded to at least 16 rows for ``tl.dot``) over one run, in
base 2. The second merges the runs by their log-sum-exps, and looks only at runs that were written. How many there are
follows from ``seq_lens`` on the device, so that a captured graph stays right when lengths change.

CPU counterpart: ``paged_attention``; reference: ``paged_attention_reference``.
"""

# Triton's decorator is untyped for mypy, and kernel parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, misc, no-any-return, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ringserve.kernels.gpu.architecture import Architecture
from ringserve.kernels.gpu.attention_tile import LOG2_E, cap_scores, load_keys, load_page_ids, load_values
from ringserve.kernels.gpu.kv_format import kv_format, load_scales, page_strides


@dataclass(frozen=True)
class DecodeConfig:
    """How a device runs the first stage."""

    block_n: int
    """Keys of a tile."""
    num_warps: int
    num_stages: int
    min_split: int
    """Fewest keys that are worth a run of their own."""


CONFIGS = {
    (Architecture.LARGE, 1, False): DecodeConfig(block_n=64, num_warps=4, num_stages=4, min_split=256),
    (Architecture.LARGE, 1, True): DecodeConfig(block_n=32, num_warps=4, num_stages=4, min_split=256),
    (Architecture.LARGE, 2, False): DecodeConfig(block_n=64, num_warps=4, num_stages=3, min_split=256),
    (Architecture.LARGE, 2, True): DecodeConfig(block_n=64, num_warps=4, num_stages=3, min_split=256),
    (Architecture.LARGE, 4, False): DecodeConfig(block_n=32, num_warps=4, num_stages=2, min_split=256),
    (Architecture.LARGE, 4, True): DecodeConfig(block_n=16, num_warps=4, num_stages=2, min_split=256),
    (Architecture.COMPACT, 1, False): DecodeConfig(block_n=64, num_warps=4, num_stages=4, min_split=256),
    (Architecture.COMPACT, 1, True): DecodeConfig(block_n=32, num_warps=4, num_stages=4, min_split=256),
    (Architecture.COMPACT, 2, False): DecodeConfig(block_n=64, num_warps=4, num_stages=3, min_split=256),
    (Architecture.COMPACT, 2, True): DecodeConfig(block_n=32, num_warps=4, num_stages=3, min_split=256),
    (Architecture.COMPACT, 4, False): DecodeConfig(block_n=32, num_warps=4, num_stages=2, min_split=256),
    (Architecture.COMPACT, 4, True): DecodeConfig(block_n=16, num_warps=4, num_stages=2, min_split=256),
    (Architecture.CDNA, 1, False): DecodeConfig(block_n=32, num_warps=4, num_stages=2, min_split=256),
    (Architecture.CDNA, 1, True): DecodeConfig(block_n=32, num_warps=4, num_stages=2, min_split=256),
    (Architecture.CDNA, 2, False): DecodeConfig(block_n=32, num_warps=4, num_stages=2, min_split=256),
    (Architecture.CDNA, 2, True): DecodeConfig(block_n=32, num_warps=4, num_stages=2, min_split=256),
    (Architecture.CDNA, 4, False): DecodeConfig(block_n=32, num_warps=4, num_stages=1, min_split=256),
    (Architecture.CDNA, 4, True): DecodeConfig(block_n=16, num_warps=4, num_stages=1, min_split=256),
}
"""By device, bytes of a key's element, and whether heads are wider than 128. Loads are pipelined on sm_80, sm_90 and
sm_100, and nothing spills but two registers with heads of 80 on sm_100 (``tests/kernels/gpu`` compiles for them)."""


def decode_config(architecture: Architecture, k_pages: torch.Tensor, value_dim: int) -> DecodeConfig:
    """For these pages."""
    return CONFIGS[architecture, k_pages.element_size(), max(k_pages.shape[-1], value_dim) > 128]


MAX_SPLITS = 64


@dataclass(frozen=True)
class DecodeScratch:
    """Partial results between the two stages; may be kept and shared by all layers."""

    values: torch.Tensor
    """float32 [B, H, splits, Dv]."""
    log_sums: torch.Tensor
    """float32 [B, H, splits], base 2."""

    @classmethod
    def allocate(cls, batch: int, heads: int, splits: int, value_dim: int, device: torch.device) -> DecodeScratch:
        """Uninitialised scratch."""
        shape = (batch, heads, splits)
        return cls(
            torch.empty((*shape, value_dim), dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
        )


def choose_splits(batch: int, kv_heads: int, num_multiprocessors: int) -> int:
    """The power of two that gives every multiprocessor two programs, as far as MAX_SPLITS allows."""
    splits = 1
    while splits < MAX_SPLITS and batch * kv_heads * splits < 2 * num_multiprocessors:
        splits *= 2
    return splits


@triton.jit
def _runs(n, SPLITS: tl.constexpr, MIN_SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """First visible key, the tile boundary at or before it, and the length of a run (a multiple of BLOCK_N)."""
    if WINDOW > 0:
        first = tl.maximum(n - WINDOW, 0)
    else:
        first = n * 0
    base = first // BLOCK_N * BLOCK_N
    span = n - base
    runs = tl.maximum(tl.minimum(SPLITS, tl.cdiv(span, MIN_SPLIT)), 1)
    length = tl.cdiv(tl.cdiv(span, runs), BLOCK_N) * BLOCK_N
    return first, base, length


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["table_ptr", "length_ptr"])
def _decode_runs(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,
    length_ptr,
    out_ptr,
    partial_ptr,
    log_sum_ptr,
    scale_log2,  # scale * log2(e)
    softcap_log2,  # softcap * log2(e)
    inverse_softcap,  # scale / softcap
    q_batch_stride,
    q_head_stride,
    out_batch_stride,
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
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    BLOCK_H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    SOFTCAP: tl.constexpr,
    FORMAT: tl.constexpr,  # a KVFormat
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1)
    split = tl.program_id(2)
    n = tl.load(length_ptr + b)
    first, base, length = _runs(n, SPLITS, MIN_SPLIT, BLOCK_N, WINDOW)
    start = base + split * length
    end = tl.minimum(start + length, n)

    rows = tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_DV)
    columns = tl.arange(0, BLOCK_N)
    head = g * GROUP + rows
    out_rows = out_ptr + b * out_batch_stride + head[:, None] * out_head_stride + value_dims[None, :]
    out_mask = (rows < GROUP)[:, None] & (value_dims < DV)[None, :]

    if start < end:
        q = tl.load(
            q_ptr + b * q_batch_stride + head[:, None] * q_head_stride + dims[None, :],
            mask=(rows < GROUP)[:, None] & (dims < D)[None, :],
            other=0.0,
        )
        table = table_ptr + b * table_stride
        highest = tl.full([BLOCK_H], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_H], tl.float32)
        acc = tl.zeros([BLOCK_H, BLOCK_DV], tl.float32)
        # Carried from one iteration to the next (``load_page_ids``).
        pages = load_page_ids(table, start + columns, end, PAGE)
        for at in tl.range(start, end, BLOCK_N, num_stages=STAGES):
            position = at + columns
            visible = (position >= first) & (position < end)
            slot = position % PAGE
            k_rows = pages * k_page_stride + g * k_head_stride + slot * k_slot_stride
            v_rows = pages * v_page_stride + g * v_head_stride + slot * v_slot_stride
            scale_rows = pages * scale_page_stride + g * scale_head_stride + slot
            pages = load_page_ids(table, position + BLOCK_N, end, PAGE)
            k = load_keys(k_ptr, k_rows, dims, visible, q.dtype, D, FORMAT)
            scores = tl.dot(q, k, input_precision=PRECISION)
            if FORMAT != 0:
                scores *= load_scales(k_scale_ptr + scale_rows, visible, FORMAT)[None, :]
            scores = cap_scores(scores, scale_log2, softcap_log2, inverse_softcap, SOFTCAP)
            scores = tl.where(visible[None, :], scores, float("-inf"))
            # Every tile has a visible key, so the maximum is finite.
            new_highest = tl.maximum(highest, tl.max(scores, 1))
            rescale = tl.exp2(highest - new_highest)
            weights = tl.exp2(scores - new_highest[:, None])
            total = total * rescale + tl.sum(weights, 1)
            acc = acc * rescale[:, None]
            v = load_values(v_ptr, v_rows, value_dims, visible, q.dtype, DV, FORMAT)
            if FORMAT != 0:
                weights *= load_scales(v_scale_ptr + scale_rows, visible, FORMAT)[None, :]
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
            highest = new_highest
        acc = acc / total[:, None]
        if SPLITS == 1:
            tl.store(out_rows, acc.to(out_ptr.dtype.element_ty), mask=out_mask)
        else:
            run = (b * (KV_HEADS * GROUP) + head) * SPLITS + split
            tl.store(partial_ptr + run[:, None] * DV + value_dims[None, :], acc, mask=out_mask)
            tl.store(log_sum_ptr + run, highest + tl.log2(total), mask=rows < GROUP)
    elif SPLITS == 1:
        # An empty row (padding of a captured graph) still gets a defined result.
        tl.store(out_rows, tl.zeros([BLOCK_H, BLOCK_DV], out_ptr.dtype.element_ty), mask=out_mask)


@triton.jit(do_not_specialize_on_alignment=["length_ptr"])
def _merge_runs(
    partial_ptr,
    log_sum_ptr,
    length_ptr,
    out_ptr,
    out_batch_stride,
    out_head_stride,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    n = tl.load(length_ptr + b)
    _, base, length = _runs(n, SPLITS, MIN_SPLIT, BLOCK_N, WINDOW)
    splits = tl.arange(0, SPLITS)
    value_dims = tl.arange(0, BLOCK_DV)
    # The others were never written: whatever lies there, NaN included, must not be read.
    written = base + splits * length < n
    run = (b * HEADS + head) * SPLITS + splits
    log_sums = tl.load(log_sum_ptr + run, mask=written, other=float("-inf"))
    highest = tl.max(log_sums, 0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(log_sums - highest)
    partial = tl.load(
        partial_ptr + run[:, None] * DV + value_dims[None, :],
        mask=written[:, None] & (value_dims < DV)[None, :],
        other=0.0,
    )
    total = tl.sum(weights, 0)
    result = tl.sum(partial * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(
        out_ptr + b * out_batch_stride + head * out_head_stride + value_dims,
        result.to(out_ptr.dtype.element_ty),
        mask=value_dims < DV,
    )


def paged_decode(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    scratch: DecodeScratch,
    config: DecodeConfig,
    *,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention of each sequence's last token into ``out``, which is returned; see the module for shapes.

    The number of splits is the scratch's, a power of two. ``scales``: those of keys and values, for pages in an 8-bit
    format. Nothing is allocated and nothing waits for the device.
    """
    batch, heads, key_dim = q.shape
    _, kv_heads, page_size, value_dim = v_pages.shape
    splits = scratch.log_sums.shape[2]
    k_scales, v_scales = scales if scales is not None else (k_pages, v_pages)  # not looked at
    cap = softcap if softcap is not None else 1.0
    window_size = window if window is not None else 0
    block_dv = max(16, triton.next_power_of_2(value_dim))
    _decode_runs[(batch, kv_heads, splits)](
        q,
        k_pages,
        v_pages,
        k_scales,
        v_scales,
        block_table,
        seq_lens,
        out,
        scratch.values,
        scratch.log_sums,
        scale * LOG2_E,
        cap * LOG2_E,
        scale / cap,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        *page_strides(k_pages, v_pages, k_scales),
        block_table.stride(0),
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        BLOCK_H=max(16, triton.next_power_of_2(heads // kv_heads)),
        D=key_dim,
        BLOCK_D=max(16, triton.next_power_of_2(key_dim)),
        DV=value_dim,
        BLOCK_DV=block_dv,
        PAGE=page_size,
        BLOCK_N=config.block_n,
        SPLITS=splits,
        MIN_SPLIT=config.min_split,
        WINDOW=window_size,
        SOFTCAP=softcap is not None,
        FORMAT=int(kv_format(k_pages.dtype)),
        STAGES=config.num_stages,
        # Products of float32 must not go through TF32.
        PRECISION="ieee",
        num_warps=config.num_warps,
    )
    if splits > 1:
        _merge_runs[(batch, heads)](
            scratch.values,
            scratch.log_sums,
            seq_lens,
            out,
            out.stride(0),
            out.stride(1),
            HEADS=heads,
            DV=value_dim,
            BLOCK_DV=block_dv,
            BLOCK_N=config.block_n,
            SPLITS=splits,
            MIN_SPLIT=config.min_split,
            WINDOW=window_size,
            num_warps=4,
        )
    return out
