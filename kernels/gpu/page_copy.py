"""Whole KV pages copied, gathered and scattered over all layers, on GPUs (Triton).

``kernels/page_copy.py`` is the CPU counterpart and the reference; it has the layout and the shapes. A slab of int64
words moves most at once.
"""

# Triton's decorator is untyped for mypy, and kernel parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, misc, no-any-return, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ringserve.kernels.page_copy import PageLayout

BLOCK = 1024
NUM_WARPS = 4


@triton.jit(do_not_specialize_on_alignment=["source_id_ptr", "target_id_ptr"])
def _move_pages(
    source_ptr,
    target_ptr,
    source_id_ptr,
    target_id_ptr,
    offset_ptr,
    size_ptr,
    start_ptr,
    stage_stride,
    FROM_STAGE: tl.constexpr,
    TO_STAGE: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    array = tl.program_id(1)
    source_id = tl.load(source_id_ptr + i).to(tl.int64)
    target_id = tl.load(target_id_ptr + i).to(tl.int64)
    if (source_id >= 0) & (target_id >= 0):
        offset = tl.load(offset_ptr + array)
        size = tl.load(size_ptr + array)
        start = tl.load(start_ptr + array)
        words = tl.program_id(2).to(tl.int64) * BLOCK_W + tl.arange(0, BLOCK_W)
        if FROM_STAGE:
            source = source_ptr + i * stage_stride + start
        else:
            source = source_ptr + offset + source_id * size
        if TO_STAGE:
            target = target_ptr + i * stage_stride + start
        else:
            target = target_ptr + offset + target_id * size
        tl.store(target + words, tl.load(source + words, mask=words < size), mask=words < size)


def _move(
    source: torch.Tensor,
    target: torch.Tensor,
    source_ids: torch.Tensor,
    target_ids: torch.Tensor,
    layout: PageLayout,
    from_stage: bool,
    to_stage: bool,
) -> None:
    grid = (source_ids.shape[0], layout.num_arrays, triton.cdiv(layout.largest, BLOCK))
    _move_pages[grid](
        source,
        target,
        source_ids,
        target_ids,
        layout.offsets,
        layout.sizes,
        layout.starts,
        layout.page_words,
        FROM_STAGE=from_stage,
        TO_STAGE=to_stage,
        BLOCK_W=BLOCK,
        num_warps=NUM_WARPS,
    )


def copy_pages(slab: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, layout: PageLayout) -> None:
    """Pages of the slab onto others of it."""
    _move(slab, slab, sources, targets, layout, False, False)


def gather_pages(slab: torch.Tensor, ids: torch.Tensor, stage: torch.Tensor, layout: PageLayout) -> None:
    """Pages of the slab into the stage."""
    _move(slab, stage, ids, ids, layout, False, True)


def scatter_pages(stage: torch.Tensor, ids: torch.Tensor, slab: torch.Tensor, layout: PageLayout) -> None:
    """The stage's pages into the slab."""
    _move(stage, slab, ids, ids, layout, True, False)
