"""The skeleton that every process runs: a mailbox, typed handlers, named neighbours, startup / loop / shutdown.

An actor owns all of its state and talks only to its neighbours. One turn of the loop is: drain a bounded batch of
every incoming ring through ``handle``, ``act`` once, flush every outgoing ring, and block on the doorbell if there is
nothing left to do. The scheduler and the executor run it on a blocking wait (``run_blocking``); the frontend and the
tokenizer process run it on uvloop (``run_async``), since they also await sockets and worker threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ringserve.messages import SupervisorInbound

T_contra = TypeVar("T_contra", contravariant=True)


class Outbox(Protocol[T_contra]):
    """Where messages to one neighbour go. ``send`` never blocks; the skeleton flushes after ``act``."""

    def send(self, message: T_contra) -> None: ...


@dataclass(frozen=True)
class ActorContext:
    """What an actor is born with."""

    role: str
    """"frontend-0", "tokenizer-0", "scheduler" or "executor"."""
    settings: Any
    """The process's slice of the configuration (``ringserve.config``)."""
    outboxes: Mapping[str, Outbox[Any]]
    """By the neighbour's role."""
    report: Callable[[SupervisorInbound], None]
    """Tell the supervisor (start-up progress, started, cannot start)."""
    flush_soon: Callable[[], None]
    """Async actors: messages were sent outside ``handle`` and ``act``; flush them at the end of this loop turn."""


class BlockingActor(Protocol):
    """An actor that computes and waits for messages only."""

    def startup(self) -> None: ...

    def handle(self, message: Any, source: str) -> None:
        """One message of the neighbour ``source``."""

    def act(self) -> bool:
        """Once after each batch. True: there is more to do at once, do not block."""

    def shutdown(self) -> None: ...


class AsyncActor(Protocol):
    """An actor that also awaits sockets and threads."""

    async def run(self) -> None:
        """The actor's whole life on the loop; returns some time after ``request_stop``."""

    def handle(self, message: Any, source: str) -> None:
        """One message of the neighbour ``source``; called from the doorbell's reader."""

    def act(self) -> None:
        """Once after each batch."""

    def request_stop(self) -> None:
        """SIGTERM: finish what runs (bounded), then return from ``run``."""
