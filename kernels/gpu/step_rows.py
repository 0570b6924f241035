"""What a step's rows are, from the slots' state, on GPUs (Triton): the next step begins where the last one ended.

Row ``r`` belongs to slot ``s = slots[r]``. With ``row_lengths[r] = 0`` it decodes: its token is the slot's last one::

    seq_lens[r]     = lengths[s]
    token_ids[r]    = last_tokens[s]
    positions[r]    = lengths[s] - 1
    slot_mapping[r] = table[s, positions[r] / page_size] * page_size + positions[r] % page_size

Otherwise it has a chunk, whose tokens the host sends, and ``seq_lens[r] = row_lengths[r]``. Of its block table
``pages[r, : ceil(seq_lens[r] / page_size)]`` is copied; the rest is left as it is. ``row_ks[r] = ks[s]``. Padding (slot
-1): token 0 at position 0, slot_mapping -1, length 0, page 0, k -1.

Shapes: all int32; slots, row_lengths, seq_lens, row_ks ``[rows]``; token_ids, positions, slot_mapping ``[rows]`` (of
rows with chunks not written); lengths, last_tokens, ks ``[slots]``; table ``[slots, max_pages]``; pages
``[rows, max_pages]``.
"""

# Triton's decorator is untyped for mypy, and kernel parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, misc, no-any-return, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

BLOCK = 256
NUM_WARPS = 1


@dataclass(frozen=True)
class RowArrays:
    """What is written; a step uses the first rows of each."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor
    pages: torch.Tensor
    ks: torch.Tensor


@triton.jit(
    do_not_specialize=["table_stride", "page_stride"],
    do_not_specialize_on_alignment=["token_ptr", "position_ptr", "mapping_ptr"],
)
def _step_rows(
    slot_ptr,
    row_length_ptr,
    length_ptr,
    last_token_ptr,
    k_ptr,
    table_ptr,
    token_ptr,
    position_ptr,
    mapping_ptr,
    seq_len_ptr,
    page_ptr,
    row_k_ptr,
    table_stride,
    page_stride,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + r).to(tl.int64)
    if slot < 0:
        tl.store(token_ptr + r, 0)
        tl.store(position_ptr + r, 0)
        tl.store(mapping_ptr + r, -1)
        tl.store(seq_len_ptr + r, 0)
        tl.store(row_k_ptr + r, -1)
        tl.store(page_ptr + r * page_stride, 0)
    else:
        table = table_ptr + slot * table_stride
        length = tl.load(row_length_ptr + r)
        if length == 0:
            length = tl.load(length_ptr + slot)
            position = length - 1
            tl.store(token_ptr + r, tl.load(last_token_ptr + slot))
            tl.store(position_ptr + r, position)
            tl.store(mapping_ptr + r, tl.load(table + position // PAGE) * PAGE + position % PAGE)
        tl.store(seq_len_ptr + r, length)
        tl.store(row_k_ptr + r, tl.load(k_ptr + slot))
        num_pages = tl.cdiv(length, PAGE)
        for start in range(0, num_pages, BLOCK_N):
            column = start + tl.arange(0, BLOCK_N)
            page = tl.load(table + column, mask=column < num_pages, other=0)
            tl.store(page_ptr + r * page_stride + column, page, mask=column < num_pages)


def step_rows(
    slots: torch.Tensor,
    row_lengths: torch.Tensor,
    lengths: torch.Tensor,
    last_tokens: torch.Tensor,
    ks: torch.Tensor,
    table: torch.Tensor,
    page_size: int,
    rows: RowArrays,
) -> None:
    """See the module. At least one row."""
    _step_rows[(slots.shape[0],)](
        slots,
        row_lengths,
        lengths,
        last_tokens,
        ks,
        table,
        rows.token_ids,
        rows.positions,
        rows.slot_mapping,
        rows.seq_lens,
        rows.pages,
        rows.ks,
        table.stride(0),
        rows.pages.stride(0),
        PAGE=page_size,
        BLOCK_N=BLOCK,
        num_warps=NUM_WARPS,
    )
