"""All sequences of the executor, one row ("slot") each, as columns: what is known of them and where their pages lie.

Columns are numpy arrays, so that a step of many sequences costs a few array operations and compiled code can read them
in place. Rows, token ids and block tables grow on demand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringserve.messages.columns import unpack_i32
from ringserve.messages.sampling import SamplingParams
from ringserve.messages.steps import NewSequence, SchedulerOutput


class SlotTable:
    """Columns indexed by slot."""

    def __init__(self) -> None:
        self.active: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self.length: NDArray[np.int64] = np.zeros(0, np.int64)
        """Tokens known."""
        self.computed: NDArray[np.int64] = np.zeros(0, np.int64)
        """Tokens whose keys and values lie in the pages."""
        self.num_prompt: NDArray[np.int64] = np.zeros(0, np.int64)
        self.num_pages: NDArray[np.int64] = np.zeros(0, np.int64)
        self.samples: NDArray[np.bool_] = np.zeros(0, np.bool_)
        """Whether a token is drawn at the end of what is known (max_tokens 0: never)."""
        self.failed: set[int] = set()
        """Slots whose sampling failed: later rows, planned before the scheduler knew, compute and yield nothing."""
        self.wants_prompt: NDArray[np.bool_] = np.zeros(0, np.bool_)
        """Whether log probabilities of the prompt are asked for; they are the same for every choice, the first has
        them."""
        self.ids: NDArray[np.int32] = np.zeros((0, 1024), np.int32)
        """[slots, length]."""
        self.pages: NDArray[np.int32] = np.zeros((0, 32), np.int32)
        """[slots, pages]: block tables."""
        self.sampling: dict[int, SamplingParams] = {}

    def apply(
        self, output: SchedulerOutput, page_size: int, on_start: Callable[[NewSequence], None]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Bring the slots up to date, ``on_start`` being told of each sequence that has got one; the rows' slots and
        token counts.

        Raises RuntimeError for a step that does not fit the slots' state: the two processes disagree.
        """
        if output.freed_slots:
            for slot in unpack_i32(output.freed_slots):
                self.free(slot)
        for new in output.new_sequences:
            self.start(new)
            on_start(new)
        slots = np.frombuffer(output.slots, dtype=np.int32)
        counts = np.frombuffer(output.num_tokens, dtype=np.int32)
        page_counts = np.frombuffer(output.new_page_counts, dtype=np.int32)
        if not len(slots) == len(counts) == len(page_counts):
            raise RuntimeError(f"step {output.step_id}: columns of different lengths")
        if not len(slots):
            return slots, counts
        if max(output_slots := slots.tolist()) >= len(self.active) or not self.active[slots].all():
            raise RuntimeError(f"step {output.step_id}: nobody is in some of the slots {output_slots}")
        if output.new_pages:
            pages = np.frombuffer(output.new_pages, dtype=np.int32)
            first = 0
            for row in np.flatnonzero(page_counts).tolist():
                last = first + int(page_counts[row])
                self.add_pages(int(slots[row]), pages[first:last])
                first = last
        known = np.minimum(self.length[slots], self.num_pages[slots] * page_size)
        bad = (counts < 1) | (self.computed[slots] + counts > known)
        if bad.any():
            row = int(np.argmax(bad))
            slot = int(slots[row])
            raise RuntimeError(
                f"step {output.step_id}, slot {slot}: {counts[row]} tokens after {self.computed[slot]} of "
                f"{self.length[slot]} known ones, {self.num_pages[slot]} pages of {page_size}"
            )
        return slots, counts

    def start(self, new: NewSequence) -> None:
        """Give its slot to a sequence."""
        ids = np.frombuffer(new.token_ids, dtype=np.int32)
        slot = new.slot
        self._grow(slot + 1, len(ids) + 1)
        self.active[slot] = True
        self.ids[slot, : len(ids)] = ids
        self.length[slot] = len(ids)
        self.computed[slot] = new.num_computed_tokens
        self.num_prompt[slot] = new.num_prompt_tokens
        self.num_pages[slot] = 0
        self.samples[slot] = new.max_tokens > 0
        self.failed.discard(slot)
        self.wants_prompt[slot] = new.sampling.prompt_logprobs >= 0 and new.choice == 0
        self.sampling[slot] = new.sampling

    def free(self, slot: int) -> None:
        """Forget a sequence; an unknown slot is nothing to do."""
        if slot < len(self.active):
            self.active[slot] = False
            self.failed.discard(slot)

    def known_ids(self, slot: int) -> NDArray[np.int32]:
        """A view of its token ids."""
        return self.ids[slot, : self.length[slot]]

    def append(self, slots: NDArray[np.int32], token_ids: NDArray[np.int32]) -> None:
        """One more token for each of ``slots`` (distinct)."""
        lengths = self.length[slots]
        longest = max(lengths.tolist(), default=0)
        if longest >= self.ids.shape[1]:
            self._grow(0, longest + 1)
        self.ids[slots, lengths] = token_ids
        self.length[slots] = lengths + 1

    def add_pages(self, slot: int, pages: Any) -> None:
        """Append to a block table."""
        first = int(self.num_pages[slot])
        last = first + len(pages)
        if last > self.pages.shape[1]:
            self.pages = _wider(self.pages, self.pages.shape[0], last)
        self.pages[slot, first:last] = pages
        self.num_pages[slot] = last

    def _grow(self, rows: int, columns: int) -> None:
        if columns > self.ids.shape[1]:
            self.ids = _wider(self.ids, self.ids.shape[0], columns)
        if rows <= len(self.active):
            return
        size = max(64, 2 * rows)
        for name in ("active", "length", "computed", "num_prompt", "num_pages", "samples", "wants_prompt"):
            column = getattr(self, name)
            wider = np.zeros(size, column.dtype)
            wider[: len(column)] = column
            setattr(self, name, wider)
        self.ids = _wider(self.ids, size, 0)
        self.pages = _wider(self.pages, size, 0)


def _wider(matrix: NDArray[np.int32], rows: int, columns: int) -> NDArray[np.int32]:
    """A copy with ``rows`` rows and, where ``columns`` is more than there are, about twice that many columns."""
    width = matrix.shape[1] if columns <= matrix.shape[1] else 2 * columns
    copy = np.zeros((rows, width), matrix.dtype)
    copy[: matrix.shape[0], : matrix.shape[1]] = matrix
    return copy
