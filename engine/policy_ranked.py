"""Policies whose order never changes: each sequence has a rank from the moment it arrives, the smallest comes first.

What the rank is, a rule says: the order of arrival, the priority, the deadline.

Aging needs no clock. If a request's claim grows by one level for every ``aging`` it has waited, all claims grow at the
same speed, so the order of any two is decided on arrival: by ``priority + arrival time / aging``. A request is passed
only by those that come at most (levels apart) x ``aging`` later, hence none starves. In the same way a request without
a deadline is due some time after it came, and is passed only by those that come within that time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import pairwise
from operator import attrgetter
from typing import Protocol

from ringserve.engine.sequence import Sequence

_RANK = attrgetter("rank")


class RankRule(Protocol):
    """What a policy's order comes from."""

    nobody_is_passed: bool
    """Whoever comes later never runs before one that waits."""

    def rank(self, sequence: Sequence) -> float:
        """Smaller comes first; equal ones in the order of arrival. The same whenever it is asked."""

    def displaces(self, head: Sequence, running: Sequence) -> bool:
        """A waiting one may throw this running one out."""


class RankedPolicy:
    """A sorted queue."""

    def __init__(self, rule: RankRule) -> None:
        self._rule = rule
        self._queue: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    def add(self, sequence: Sequence) -> None:
        self._rank(sequence)
        insort(self._queue, sequence, key=_RANK)

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._queue, sequence.rank, key=_RANK)
        if self._queue[index : index + 1] != [sequence]:
            raise ValueError(f"{sequence} does not wait")
        del self._queue[index]

    def head(self) -> Sequence | None:
        return self._queue[0] if self._queue else None

    def ahead_of(self, sequence: Sequence) -> list[Sequence]:
        self._rank(sequence)
        return self._queue[: bisect_left(self._queue, sequence.rank, key=_RANK)]

    def in_order(self, running: Iterable[Sequence]) -> list[Sequence]:
        return sorted(running, key=_RANK)

    def precedes(self, head: Sequence, running: Sequence) -> bool:
        return head.rank < running.rank

    def displaces(self, head: Sequence, running: Sequence) -> bool:
        return self._rule.displaces(head, running)

    def charge_prompt(self, sequence: Sequence, num_tokens: int) -> None:
        """Nobody keeps accounts."""

    def charge_outputs(self, sequences: Iterable[Sequence]) -> None:
        """Nobody keeps accounts."""

    def check_integrity(self, running: Iterable[Sequence]) -> list[str]:
        problems = []
        if any(earlier.rank >= later.rank for earlier, later in pairwise(self._queue)):
            problems.append(f"the queue is out of order: {self._queue}")
        for sequence in (*running, *self._queue):
            if sequence.rank != (self._rule.rank(sequence), sequence.arrival):
                problems.append(f"{sequence} has lost its place")
        ranks = [sequence.rank for sequence in running]
        if self._rule.nobody_is_passed and self._queue and ranks and max(ranks) > self._queue[0].rank:
            problems.append(f"the order of arrival is broken: {[*running, *self._queue]}")
        return problems

    def _rank(self, sequence: Sequence) -> None:
        sequence.rank = (self._rule.rank(sequence), sequence.arrival)


class ByArrival:
    """First come, first served."""

    nobody_is_passed = True

    def rank(self, sequence: Sequence) -> float:
        return sequence.arrival

    def displaces(self, head: Sequence, running: Sequence) -> bool:
        return False


class ByPriority:
    """``priority`` of the request, lower first; ``aging_ns`` of waiting are worth one level (0: no aging)."""

    nobody_is_passed = False

    def __init__(self, aging_ns: int) -> None:
        self._aging_ns = aging_ns

    def rank(self, sequence: Sequence) -> float:
        request = sequence.request
        return request.priority + (request.queued_ns / self._aging_ns if self._aging_ns else 0.0)

    def displaces(self, head: Sequence, running: Sequence) -> bool:
        """A whole level: among equals nobody loses what is computed."""
        return head.rank[0] + 1 <= running.rank[0]


class ByDeadline:
    """Earliest deadline first: when the first token is due, or the last one. Without a deadline a request is due
    ``default_ns`` after it came."""

    nobody_is_passed = False

    def __init__(self, default_ns: int) -> None:
        self._default_ns = default_ns

    def rank(self, sequence: Sequence) -> float:
        request = sequence.request
        due = [due_ns for due_ns in (request.first_token_due_ns, request.due_ns) if due_ns]
        return min(due, default=request.queued_ns + self._default_ns)

    def displaces(self, head: Sequence, running: Sequence) -> bool:
        """Only one that named no deadline: two that did would throw each other's work away."""
        return head.request.has_deadline and not running.request.has_deadline and head.rank < running.rank
