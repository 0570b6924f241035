"""Whole KV pages copied, gathered and scattered over all layers, on GPUs (Triton).

The slab is one flat array of words; array ``a`` of it (the keys, values or scales of one layer) begins at
``offsets[a]``, and its page ``p`` is the run of ``sizes[a]`` words from ``offsets[a] + p * sizes[a]``. A page over all
arrays is ``sum(sizes)`` words; a stage holds such pages one after the other, its arrays in order (``starts[a]`` is the
sum of the sizes before ``a``)::

    copy_pages       slab page targets[i]  <-  slab page sources[i]     copy on write
    gather_pages     stage[i]              <-  slab page ids[i]         before one copy to the host
    scatter_pages    slab page ids[i]      <-  stage[i]                 after one copy from the host

Shapes: slab ``[words]``, stage ``[n, sum(sizes)]`` of the slab's type (int64 moves most at once), ids ``[n]`` int32 or
int64, all on one device. Page -1 is skipped. What is written to is distinct, and in ``copy_pages`` is no source either.
"""

# Triton's decorator is untyped for mypy, and kernel parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, misc, no-any-return, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

BLOCK = 1024
NUM_WARPS = 4


@dataclass(frozen=True)
class PageLayout:
    """Where a slab's arrays lie, in words."""

    offsets: torch.Tensor
    """int64 [arrays], on the slab's device; so are the others."""
    sizes: torch.Tensor
    starts: torch.Tensor
    largest: int
    """Of the sizes."""
    page_words: int
    """Their sum: a page over all arrays."""

    @classmethod
    def create(cls, offsets: Sequence[int], sizes: Sequence[int], device: torch.device) -> PageLayout:
        """From offsets and sizes in words."""
        starts = [sum(sizes[:a]) for a in range(len(sizes))]
        columns = torch.tensor([list(offsets), list(sizes), starts], dtype=torch.int64, device=device)
        return cls(columns[0], columns[1], columns[2], largest=max(sizes), page_words=sum(sizes))


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
    grid = (source_ids.shape[0], layout.sizes.shape[0], triton.cdiv(layout.largest, BLOCK))
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
