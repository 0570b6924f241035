"""Policies whose order never changes: each sequence has a rank from the moment it arrives, the smallest comes first.

Aging needs no clock either. If a request's claim grows by one level for every ``aging`` it has waited, all claims grow
at the same speed, so the order of any two is decided on arrival: by ``priority + arrival time / aging``. A request is
passed only by those that come at most (levels apart) x ``aging`` later, hence none starves.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import pairwise
from operator import attrgetter

from ringserve.engine.sequence import Sequence

_RANK = attrgetter("rank")


class RankedPolicy:
    """A sorted queue; subclasses say what the rank is."""

    def __init__(self) -> None:
        self._queue: list[Sequence] = []

    def rank(self, sequence: Sequence) -> float:
        """Smaller comes first; equal ones in the order of arrival."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    def add(self, sequence: Sequence) -> None:
        sequence.rank = (self.rank(sequence), sequence.arrival)
        insort(self._queue, sequence, key=_RANK)

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._queue, sequence.rank, key=_RANK)
        if self._queue[index : index + 1] != [sequence]:
            raise ValueError(f"{sequence} does not wait")
        del self._queue[index]

    def head(self) -> Sequence | None:
        return self._queue[0] if self._queue else None

    def in_order(self, running: Iterable[Sequence]) -> list[Sequence]:
        return sorted(running, key=_RANK)

    def precedes(self, head: Sequence, running: Sequence) -> bool:
        return head.rank < running.rank

    def displaces(self, head: Sequence, running: Sequence) -> bool:
        return False

    def charge(self, sequence: Sequence, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Nobody keeps accounts."""

    def check_integrity(self, running: Iterable[Sequence]) -> list[str]:
        if any(earlier.rank >= later.rank for earlier, later in pairwise(self._queue)):
            return [f"the queue is out of order: {self._queue}"]
        return []


class FcfsPolicy(RankedPolicy):
    """First come, first served. Every running sequence arrived before every waiting one."""

    def rank(self, sequence: Sequence) -> float:
        return sequence.arrival

    def check_integrity(self, running: Iterable[Sequence]) -> list[str]:
        queue = [*running, *self._queue]
        if any(earlier.arrival >= later.arrival for earlier, later in pairwise(queue)):
            return [f"the order of arrival is broken: {queue}"]
        return []


class PriorityPolicy(RankedPolicy):
    """``priority`` of the request, lower first; ``aging_ns`` of waiting are worth one level (0: no aging)."""

    def __init__(self, aging_ns: int) -> None:
        super().__init__()
        self._aging_ns = aging_ns

    def rank(self, sequence: Sequence) -> float:
        request = sequence.request
        return request.priority + (request.queued_ns / self._aging_ns if self._aging_ns else 0.0)

    def displaces(self, head: Sequence, running: Sequence) -> bool:
        """A whole level: among equals nobody loses what is computed."""
        return head.rank[0] + 1 <= running.rank[0]
