"""What the host knows of the slots of a device: how many tokens, which pages, and who has each of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ringserve.engine.gpu.device_state import DeviceState
from ringserve.engine.gpu.device_step import StepSizes
from ringserve.engine.gpu.sequence_writes import SlotValues
from ringserve.engine.slot_table import SlotTable
from ringserve.messages.steps import NewSequence, SchedulerOutput

_Words = NDArray[np.int32]


class SlotBooks:
    """Columns by slot, as they are once everything submitted is done."""

    def __init__(self, sizes: StepSizes, eos_token_ids: Sequence[int]) -> None:
        self._sizes = sizes
        self._eos_token_ids = tuple(eos_token_ids)
        self.table = SlotTable()
        """The ids of tokens that were drawn are not in it."""
        self.tenants = np.zeros(sizes.num_slots, dtype=np.int64)
        """A number for each sequence that has had a slot."""
        self.ks: _Words = np.full(sizes.num_slots, -1, dtype=np.int32)
        """Log probabilities asked for, as ``SamplingParams.logprobs``."""
        self._num_tenants = 0

    def apply(self, output: SchedulerOutput) -> tuple[_Words, _Words, list[SlotValues]]:
        """Bring the slots up to date: the rows' slots and token counts, and what the device must be told of sequences
        that have got a slot. Raises RuntimeError for a message that does not fit what is known."""
        starting: list[SlotValues] = []
        slots, counts = self.table.apply(output, self._sizes.page_size, partial(self._start, starting))
        return slots, counts, starting

    def page_writes(self, output: SchedulerOutput, state: DeviceState) -> list[tuple[_Words, _Words]]:
        """(addresses, words) of the pages that a step, already applied, adds to block tables."""
        slots = np.frombuffer(output.slots, dtype=np.int32)
        page_counts = np.frombuffer(output.new_page_counts, dtype=np.int32)
        rows = np.flatnonzero(page_counts)
        if not len(rows):
            return []
        ends = self.table.num_pages[slots[rows]]
        if int(ends.max()) > self._sizes.max_pages:
            raise RuntimeError(f"a block table of {ends.max()} pages; there is room for {self._sizes.max_pages}")
        counts = page_counts[rows].astype(np.int64)
        # Position of each page: from its row's first new one on.
        columns = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        columns += np.repeat(ends - counts, counts)
        addresses = state.addresses("block_tables", np.repeat(slots[rows], counts).astype(np.int64), columns)
        return [(addresses, np.frombuffer(output.new_pages, dtype=np.int32))]

    def advance(self, slots: _Words, counts: _Words, drawing: _Words) -> None:
        """So many tokens were submitted, and those of ``drawing`` get one more: which, only the device knows."""
        self.table.computed[slots] += counts
        self.table.append(drawing, np.zeros(len(drawing), np.int32))

    def _start(self, starting: list[SlotValues], new: NewSequence) -> None:
        if new.slot >= self._sizes.num_slots:
            raise RuntimeError(f"slot {new.slot} of {self._sizes.num_slots}")
        self._num_tenants += 1
        self.tenants[new.slot] = self._num_tenants
        values = SlotValues.of(new, self._eos_token_ids, self._sizes.vocab_size)
        self.ks[new.slot] = values.num_logprobs
        starting.append(values)
