"""Noticing that an object was inherited by fork, for the price of one comparison.

``os.getpid`` is a system call; it would cost more than everything else that a socket's end does for a message. The C
extension counts in the same way.
"""

from __future__ import annotations

import os


class ForkCounter:
    """``generation`` changes in every child of fork: an object that remembers another value belongs to the parent."""

    def __init__(self) -> None:
        self.generation = 0
        os.register_at_fork(after_in_child=self._count)

    def _count(self) -> None:
        self.generation += 1


FORKS = ForkCounter()
"""The one counter: callbacks at fork cannot be taken back, so objects have none of their own."""
