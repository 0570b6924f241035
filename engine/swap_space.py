"""Which pages of the host hold what was swapped out, and whether swapping is worth it. Knows numbers only.

A preempted sequence may be computed again, or its pages may go to the host and come back. Both cost time that other
sequences wait for: the first the prefill of its tokens, the second two copies over the bus.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SwapCosts:
    """What was measured at start."""

    bytes_per_page: int
    bytes_per_second: float
    """Of one direction."""
    seconds_per_swap: float = 2e-4
    """Of its own, whatever the size: launches and messages, both ways together."""

    def should_swap(self, num_pages: int, recompute_seconds: float) -> bool:
        """Whether two copies of so many pages are quicker than computing their tokens again."""
        copies = 2 * num_pages * self.bytes_per_page / self.bytes_per_second + self.seconds_per_swap
        return copies < recompute_seconds


class SwapSpace:
    """Host pages ``0 .. num_pages - 1``; who holds which, by the owner's name."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages))
        """Ascending: low pages first, so that an owner's pages tend to be neighbours, which one copy moves."""
        self._held: dict[Hashable, list[int]] = {}

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def take(self, owner: Hashable, count: int) -> list[int] | None:
        """``count`` pages for ``owner``, who must hold none; None where there are not enough."""
        if owner in self._held:
            raise ValueError(f"{owner!r} already has pages")
        if count > len(self._free):
            return None
        pages, self._free = self._free[:count], self._free[count:]
        self._held[owner] = pages
        return list(pages)

    def release(self, owner: Hashable) -> list[int]:
        """The owner's pages, which it no longer holds. Raises KeyError for one that holds none."""
        pages = self._held.pop(owner)
        self._free = sorted(self._free + pages)  # runs in order: merged in linear time
        return pages

    def holds(self, owner: Hashable) -> bool:
        """Whether the owner has pages."""
        return owner in self._held

    @property
    def held(self) -> Mapping[Hashable, Sequence[int]]:
        """Who has which pages."""
        return self._held

    def check_integrity(self) -> list[str]:
        """What is wrong; empty when every page is free or held, once."""
        pages = sorted([*self._free, *(page for held in self._held.values() for page in held)])
        problems = [] if pages == list(range(self.num_pages)) else [f"host pages are lost or shared: {pages}"]
        if self._free != sorted(self._free):
            problems.append("free host pages are out of order")
        return problems
