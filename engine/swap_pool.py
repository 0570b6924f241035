"""Memory of the host for KV pages of preempted sequences, and the way there and back.

A page goes as a whole, over all layers: the pages are gathered into a stage on the device, and one copy beside the
computation takes the stage to (pinned) host memory; back the same way. There are two stages, so that one is filled
while the other is copied; a stage is used again only after its last copy.

Which host page holds whose data is ``swapping.py``'s business, in the scheduler. It gives a device page away as soon as
it has asked for its swap, and a host page once the step that brings it back is planned. That is safe whatever the lane
delays, since everything that touches either runs in the order in which it was asked for:

* A device page that went out is read by a gather, which is compute: it runs after the steps that wrote the page and
  before whatever writes it next, another step's tokens or a scatter.
* A host page is written and read by the lane alone, which runs its transfers in order: a page that is given to
  something else is written after it was read.
* A page that comes in is written by a scatter, which is compute, after its transfer (compute waits for the ticket),
  and so before the step that reads it.
* A stage is written by a gather only when the lane has done its last transfer (the ticket again), by a transfer only
  after the compute that was submitted before it, so after the last scatter out of the stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ringserve.engine.array_namespace import ArrayNamespace
from ringserve.engine.kv_pool import KVPool
from ringserve.engine.model_error import ModelError
from ringserve.engine.page_swaps import check_swap_space, swap_space_too_large
from ringserve.engine.transfer_lane import TransferLane, upload
from ringserve.kernels.page_copy import PageLayout

NUM_STAGES = 2
_ROUNDS = 4

Gather = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, PageLayout], None]
"""``gather_pages`` (slab, ids, stage, layout) or ``scatter_pages`` (stage, ids, slab, layout), of the pool's device."""


@dataclass(frozen=True)
class SwapStatistics:
    """Since the start."""

    num_pages: int
    """The host's."""
    bytes_per_page: int
    pages_out: int
    pages_in: int


class SwapPool:
    """Host pages ``0 .. num_pages - 1``.

    Raises ValueError for sizes that make no sense, MemoryError where the host has not so much.
    """

    def __init__(
        self,
        pool: KVPool,
        num_pages: int,
        namespace: ArrayNamespace,
        lane: TransferLane,
        gather_pages: Gather,
        scatter_pages: Gather,
        stage_pages: int = 64,
    ) -> None:
        if num_pages < 1 or stage_pages < 1:
            raise ValueError(f"a swap pool needs pages and a stage, not {num_pages} and {stage_pages}")
        self._pool = pool
        self._lane = lane
        self._gather, self._scatter = gather_pages, scatter_pages
        slab, words = pool.slab, pool.layout.page_words
        self._device = slab.device
        # Kept: it owns the memory.
        self._array = namespace.allocate_host(num_pages * words * slab.element_size())
        self._host = torch.from_numpy(self._array).view(slab.dtype).view(num_pages, words)
        self._stages = [
            torch.empty(stage_pages, words, dtype=slab.dtype, device=slab.device) for _ in range(NUM_STAGES)
        ]
        self._tickets: list[Any] = [None] * NUM_STAGES
        self._next_stage = 0
        self._pages_out = self._pages_in = 0

    def swap_out(self, device_pages: Sequence[int], host_pages: Sequence[int]) -> None:
        """Copy ``device_pages[i]`` to ``host_pages[i]``. Raises ValueError for pages that do not exist."""
        self._check(device_pages, host_pages)
        for start in range(0, len(host_pages), len(self._stages[0])):
            stage = self._take_stage()
            part = slice(start, start + len(self._stages[0]))
            rows = self._stages[stage][: len(host_pages[part])]
            self._gather(self._pool.slab, self._ids(device_pages[part]), rows, self._pool.layout)
            self._tickets[stage] = self._lane.submit(partial(self._to_host, rows, host_pages[part]))
        self._pages_out += len(host_pages)

    def swap_in(self, host_pages: Sequence[int], device_pages: Sequence[int]) -> None:
        """Copy ``host_pages[i]`` to ``device_pages[i]``, before all compute that is submitted later. Raises ValueError
        for pages that do not exist."""
        self._check(device_pages, host_pages)
        for start in range(0, len(host_pages), len(self._stages[0])):
            stage = self._take_stage()
            part = slice(start, start + len(self._stages[0]))
            rows = self._stages[stage][: len(host_pages[part])]
            ticket = self._lane.submit(partial(self._to_device, host_pages[part], rows))
            self._lane.wait(ticket)
            self._scatter(rows, self._ids(device_pages[part]), self._pool.slab, self._pool.layout)
            self._tickets[stage] = ticket
        self._pages_in += len(host_pages)

    def statistics(self) -> SwapStatistics:
        """Sizes, and how much went either way."""
        return SwapStatistics(
            num_pages=self._host.shape[0],
            bytes_per_page=self._host.shape[1] * self._host.element_size(),
            pages_out=self._pages_out,
            pages_in=self._pages_in,
        )

    def measure(self) -> float:
        """Bytes a second, one way: the best of a few rounds. The KV pool is left as it was; for the start, when no
        host page holds anything yet."""
        count = min(len(self._stages[0]), self._host.shape[0], self._pool.num_pages)
        device_pages, host_pages = range(1, count + 1), range(count)
        before = self._pages_out, self._pages_in
        best = float("inf")
        for _ in range(_ROUNDS):  # memory is committed in the first, kernels are compiled
            started = time.perf_counter()
            self.swap_out(device_pages, host_pages)
            self._lane.drain()
            self.swap_in(host_pages, device_pages)
            self._lane.drain()
            best = min(best, time.perf_counter() - started)
        self._pages_out, self._pages_in = before
        return 2 * count * self._host.shape[1] * self._host.element_size() / max(best, 1e-9)

    def _check(self, device_pages: Sequence[int], host_pages: Sequence[int]) -> None:
        if len(device_pages) != len(host_pages):
            raise ValueError(f"{len(device_pages)} device pages for {len(host_pages)} host pages")
        if any(not 1 <= page <= self._pool.num_pages for page in device_pages):
            raise ValueError(f"a device page is not in 1 .. {self._pool.num_pages}")
        if any(not 0 <= page < self._host.shape[0] for page in host_pages):
            raise ValueError(f"a host page is not in 0 .. {self._host.shape[0] - 1}")

    def _take_stage(self) -> int:
        """The next stage; compute from now on may write it, and so may the lane."""
        stage = self._next_stage
        self._next_stage = (stage + 1) % NUM_STAGES
        if self._tickets[stage] is not None:
            self._lane.wait(self._tickets[stage])
        return stage

    def _ids(self, pages: Sequence[int]) -> torch.Tensor:
        return upload(torch.tensor(pages, dtype=torch.int32), self._device)

    def _to_host(self, rows: torch.Tensor, host_pages: Sequence[int]) -> None:
        for target, source in _runs(host_pages):
            self._host[target].copy_(rows[source], non_blocking=True)

    def _to_device(self, host_pages: Sequence[int], rows: torch.Tensor) -> None:
        for source, target in _runs(host_pages):
            rows[target].copy_(self._host[source], non_blocking=True)


def make_swap_pool(
    pool: KVPool,
    swap_space: int,
    namespace: ArrayNamespace,
    lane: TransferLane,
    gather_pages: Gather,
    scatter_pages: Gather,
) -> SwapPool | None:
    """As many host pages as fit into ``swap_space`` bytes; None for 0 bytes.

    Raises ModelError with one line where that is no page, or more than the host has.
    """
    if swap_space == 0:
        return None
    page = pool.statistics().bytes_per_page
    check_swap_space(swap_space, page)
    try:
        return SwapPool(pool, swap_space // page, namespace, lane, gather_pages, scatter_pages)
    except MemoryError as error:
        raise ModelError(swap_space_too_large(swap_space, None)) from error


def _runs(pages: Sequence[int]) -> list[tuple[slice, slice]]:
    """Consecutive pages as one copy: (pages, their places in the sequence)."""
    runs: list[tuple[slice, slice]] = []
    start = 0
    for i in range(1, len(pages) + 1):
        if i == len(pages) or pages[i] != pages[i - 1] + 1:
            runs.append((slice(pages[start], pages[i - 1] + 1), slice(start, i)))
            start = i
    return runs
