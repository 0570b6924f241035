"""The skeleton that every process runs: a mailbox, typed handlers, named neighbours, startup / loop / shutdown.

An actor owns all of its state and talks only to its neighbours. One turn of the loop is: drain a bounded batch of
every incoming ring through ``handle``, ``act`` once, flush every outgoing ring, and block on the doorbell if there is
nothing left to do. The scheduler and the executor run it on a blocking wait (``ringserve/actor_blocking.py``); the
frontend and the tokenizer process run it on uvloop (``ringserve/actor_async.py``), since they also await sockets and
worker threads. This module holds what both share: the contract, and the mailbox.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ringserve.messages.startup import SupervisorInbound
from ringserve.shm import (
    Doorbell,
    DoorbellHandle,
    DoorbellObserver,
    PeerDied,
    Phase,
    Receiver,
    RingObserver,
    Sender,
    ShmError,
    open_pidfd,
)

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
    """Messages were sent outside ``handle`` and ``act``; flush them (async actors: at the end of this loop turn)."""
    observers: Sequence[RingObserver | DoorbellObserver] = ()
    """The frontend's: every ring and doorbell of the server, for /metrics."""


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
        """SIGTERM, or a neighbour's goodbye: finish what runs (bounded), then return from ``run``."""


class Peer:
    """A neighbouring process, watched through a pidfd once it is up."""

    def __init__(self, name: str, doorbell: DoorbellHandle) -> None:
        self.name = name
        self.pidfd: int | None = None
        self._doorbell = doorbell
        self._pid = 0

    def attach(self) -> bool:
        """Open the pidfd if the peer has started by now; True when that happened in this call."""
        if self.pidfd is not None or not (pid := self._doorbell.pid):
            return False
        self._pid = pid
        try:
            self.pidfd = open_pidfd(pid)
        except ProcessLookupError:
            raise PeerDied(self.name, pid) from None
        return True

    @property
    def left_in_peace(self) -> bool:
        """It said goodbye before it ended."""
        return self._doorbell.phase == Phase.closed

    def died(self) -> PeerDied:
        """What to raise when the pidfd is readable."""
        return PeerDied(self.name, self._pid)

    def greet(self) -> None:
        """Ring the peer, so that it looks for our pid."""
        self._doorbell.ring()

    def close(self) -> None:
        if self.pidfd is not None:
            os.close(self.pidfd)
        self._doorbell.close()


class Mailbox:
    """One process's doorbell, incoming and outgoing rings, and the peers at their other ends."""

    def __init__(
        self,
        doorbell: Doorbell,
        receivers: Mapping[str, Receiver[Any]],
        senders: Mapping[str, Sender[Any]],
        peers: Sequence[Peer],
    ) -> None:
        self.doorbell = doorbell
        self.senders = senders
        self.peers = peers
        self._receivers = receivers
        self._consumers = tuple([receiver.consumer for receiver in receivers.values()])
        self._producers = tuple([sender.producer for sender in senders.values()])

    def greet(self) -> None:
        """Tell all peers that this process is up."""
        for peer in self.peers:
            peer.greet()

    def drain(self, handle: Callable[[Any, str], None]) -> None:
        """Handle a bounded batch of each incoming ring."""
        for source, receiver in self._receivers.items():
            for message in receiver.receive():
                handle(message, source)

    def flush(self) -> None:
        """Publish what was sent; what does not fit stays in order until its receiver makes room."""
        for sender in self.senders.values():
            sender.flush()

    def arm(self) -> bool:
        """True: nothing is waiting, and whatever comes will ring."""
        return self.doorbell.arm(self._consumers, self._producers)

    def close(self) -> None:
        """Close rings and descriptors; the neighbours see the end of the stream."""
        for receiver in self._receivers.values():
            receiver.consumer.close()
        for sender in self.senders.values():
            with contextlib.suppress(ShmError):  # what is still pending has no reader if the neighbour is gone
                sender.flush()
            sender.producer.close()
        for peer in self.peers:
            peer.close()
        self.doorbell.phase = Phase.closed
        self.doorbell.close()
