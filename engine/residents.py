"""The running sequences: who holds a slot of the executor and pages of the KV pool.

Entering and leaving happen here and nowhere else, so that slots, pages and what the prefix cache and the swap space
know of them never disagree. Whom to let in, and whom to throw out, is the planner's business.
"""

from __future__ import annotations

from ringserve.engine.kv_manager import KVManager
from ringserve.engine.prefix_sharing import PrefixSharing
from ringserve.engine.sequence import Sequence, SequenceStatus
from ringserve.engine.swapping import Swapping


class Residents:
    """Slots and pages, and those who hold them."""

    def __init__(self, kv: KVManager, prefixes: PrefixSharing, swaps: Swapping, max_num_seqs: int) -> None:
        self.kv = kv
        self.prefixes = prefixes
        self.swaps = swaps
        self.running: dict[Sequence, None] = {}
        """In the order in which they entered."""
        self.version = 0
        """Grows whenever somebody enters or leaves: until then a sequence that does not fit need not be tried again."""
        self.free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._freed_slots: list[int] = []

    def enter(self, sequence: Sequence, cached: list[int], num_tokens: int) -> list[int]:
        """Give a slot and pages for ``num_tokens`` tokens, which are free, beginning with those of the prefix cache.
        What it has on the host comes back.

        Returns all pages of its block table.
        """
        self.kv.share(cached)
        sequence.block_table.extend(cached)
        new = self.kv.grow(sequence.block_table, num_tokens)
        if new is None:
            raise AssertionError("pages that were counted as free are not")
        self.prefixes.start(sequence, cached)
        self.swaps.swap_in(sequence, len(cached))
        self.running[sequence] = None
        sequence.status = SequenceStatus.RUNNING
        sequence.slot = self.free_slots.pop()
        self.version += 1
        return cached + new

    def preempt(self, sequence: Sequence) -> None:
        """As ``leave``, of one that will come back: its pages go to the host where that pays."""
        self.swaps.swap_out(sequence)
        self.leave(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Take slot and pages back; it waits. The executor hears of the slot with the next step."""
        del self.running[sequence]
        self.prefixes.register(sequence)
        self.prefixes.leave(sequence)
        self.kv.release(sequence.block_table)
        self._freed_slots.append(sequence.slot)
        self.free_slots.append(sequence.slot)
        sequence.slot = -1
        sequence.num_computed_tokens = 0
        sequence.status = SequenceStatus.WAITING
        self.version += 1

    def take_freed_slots(self) -> list[int]:
        """Slots that were left since the last call."""
        freed, self._freed_slots = self._freed_slots, []
        return freed
