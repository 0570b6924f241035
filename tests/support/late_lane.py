"""A lane whose transfers run as late as they may: when compute waits for them, and not before."""

from __future__ import annotations

from collections.abc import Callable


class LateLane:
    """Keeps the promises of ``TransferLane`` and nothing more: what forgets to wait meets old data."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []
        self._done = 0

    def submit(self, transfer: Callable[[], None]) -> int:
        self._waiting.append(transfer)
        return self._done + len(self._waiting)

    def wait(self, ticket: int) -> None:
        while self._done < ticket:
            self._waiting.pop(0)()
            self._done += 1

    def is_done(self, ticket: int) -> bool:
        return ticket <= self._done

    def drain(self) -> None:
        self.wait(self._done + len(self._waiting))
