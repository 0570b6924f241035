"""Whole KV pages copied, gathered and scattered over all layers, on CPUs.

The slab is one flat array of words; array ``a`` of it (the keys, values or scales of one layer) begins at
``offsets[a]``, and its page ``p`` is the run of ``sizes[a]`` words from ``offsets[a] + p * sizes[a]``. A page over all
arrays is ``sum(sizes)`` words; a stage holds such pages one after the other, its arrays in order (``starts[a]`` is the
sum of the sizes before ``a``)::

    copy_pages       slab page targets[i]  <-  slab page sources[i]     copy on write
    gather_pages     stage[i]              <-  slab page ids[i]         before one copy to the host
    scatter_pages    slab page ids[i]      <-  stage[i]                 after one copy from the host

Shapes: slab ``[words]``, stage ``[n, sum(sizes)]`` of the slab's type, ids ``[n]`` int32 or int64. Page -1 is skipped.
What is written to is distinct, and in ``copy_pages`` is no source either. GPU counterpart: ``gpu/page_copy.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PageLayout:
    """Where a slab's arrays lie, in words."""

    offsets: torch.Tensor
    """int64 [arrays], on the slab's device; so are the next two."""
    sizes: torch.Tensor
    starts: torch.Tensor
    num_arrays: int
    largest: int
    """Of the sizes."""
    page_words: int
    """Their sum: a page over all arrays."""

    @classmethod
    def create(cls, offsets: Sequence[int], sizes: Sequence[int], device: torch.device) -> PageLayout:
        """From offsets and sizes in words."""
        starts = [sum(sizes[:a]) for a in range(len(sizes))]
        columns = torch.tensor([list(offsets), list(sizes), starts], dtype=torch.int64, device=device)
        return cls(columns[0], columns[1], columns[2], len(sizes), max(sizes), sum(sizes))


def _arrays(slab: torch.Tensor, layout: PageLayout, num_pages: int) -> Iterator[tuple[torch.Tensor, slice]]:
    """Each array as ``[pages, size]``, and its part of a stage's row."""
    columns = (layout.offsets.tolist(), layout.sizes.tolist(), layout.starts.tolist())
    for offset, size, start in zip(*columns, strict=True):
        yield slab[offset : offset + num_pages * size].view(num_pages, size), slice(start, start + size)


def copy_pages(slab: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, layout: PageLayout) -> None:
    """Pages of the slab onto others of it."""
    kept = (sources >= 0) & (targets >= 0)
    sources, targets = sources[kept].long(), targets[kept].long()
    if len(sources):
        for pages, _ in _arrays(slab, layout, int(torch.maximum(sources, targets).max()) + 1):
            pages[targets] = pages[sources]


def gather_pages(slab: torch.Tensor, ids: torch.Tensor, stage: torch.Tensor, layout: PageLayout) -> None:
    """Pages of the slab into the stage."""
    rows = torch.nonzero(ids >= 0)[:, 0]
    ids = ids[rows].long()
    if len(ids):
        for pages, part in _arrays(slab, layout, int(ids.max()) + 1):
            stage[rows, part] = pages[ids]


def scatter_pages(stage: torch.Tensor, ids: torch.Tensor, slab: torch.Tensor, layout: PageLayout) -> None:
    """The stage's pages into the slab."""
    rows = torch.nonzero(ids >= 0)[:, 0]
    ids = ids[rows].long()
    if len(ids):
        for pages, part in _arrays(slab, layout, int(ids.max()) + 1):
            pages[ids] = stage[rows, part]
