"""What a transport must offer: a duplex link of two ends, each made in its own process, each blocking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


class End(Protocol):
    """One end of a link."""

    def send(self, messages: Sequence[bytes]) -> None:
        """Send, waiting where the other end is slow."""

    def receive(self) -> list[bytes]:
        """Block; at least one message."""

    def doorbells(self) -> int:
        """System calls that woke the other end, where that is known."""

    def close(self) -> None: ...


class EndSpec(Protocol):
    """What an end is made from, in the process that uses it."""

    def open(self) -> End: ...


@dataclass
class Link:
    """Both ends, and what the creator must close when the processes are done."""

    near: EndSpec
    far: EndSpec
    close: Callable[[], None]
