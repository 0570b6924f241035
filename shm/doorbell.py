"""Doorbells: how a process sleeps until one of its neighbours has something for it.

A doorbell is one memfd page (am I asleep, heartbeat, phase, pid) and one eventfd, shared by all rings that come into
a process. The creator makes a handle; the owner attaches it once; the other ends of its channels ring it.

The order that loses no wake-up: ``clear()`` (or ``wait()`` returning) *first*, then drain, then ``arm()``, and block
only if that said True.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ringserve.shm.bell_page import PAGE_SIZE, BellPage, format_bell
from ringserve.shm.descriptors import Descriptor, create_sealed_memfd
from ringserve.shm.observer import DoorbellObserverEnd
from ringserve.shm.roles import Consumer, Producer
from ringserve.shm.socket_bell import SocketBell
from ringserve.shm.support import Transport, bell_type, choose_transport

MAX_SPIN_US = 20
"""Longest spin before a sleep: about what a sleep and a wake-up across cores cost."""


class Phase(enum.IntEnum):
    """What a process is doing, as far as its neighbours care."""

    starting = 0
    loading = 1
    ready = 2
    step = 3
    draining = 4
    closed = 5


@dataclass(frozen=True)
class DoorbellStatistics:
    """Counters of one Doorbell object since it was attached, and the page's words."""

    name: str
    pid: int
    phase: Phase
    heartbeat_ns: int
    arms: int
    refused_arms: int
    """How often something was there already when the process was about to sleep."""
    waits: int
    wakes: int
    """How often it was found rung."""
    spurious_wakes: int
    """Rings after which nothing was there."""
    spins: int
    """How often something came while ``arm`` looked around before sleeping."""


class DoorbellHandle:
    """A doorbell as its creator and its neighbours see it. Goes to a child as an argument of a spawned Process."""

    def __init__(self, name: str, transport: Literal["ring", "socket"], page: Descriptor, event: Descriptor) -> None:
        self.name = name
        self.transport = transport
        """Of the channels whose ends it may watch."""
        self._page = page
        self._event = event
        self._mapping: BellPage | None = None

    def filenos(self) -> tuple[int, int]:
        """The page's and the eventfd's descriptor."""
        return self._page.fileno(), self._event.fileno()

    def open_bell(self) -> SocketBell:
        """For the owner: a new mapping of the page, with its own copy of the eventfd."""
        return bell_type(self.transport)(*self.filenos())

    def open_page(self) -> BellPage:
        """For a neighbour: the same, but to look at and to ring."""
        return BellPage(*self.filenos())

    def _mapped(self) -> BellPage:
        if self._mapping is None:
            self._mapping = self.open_page()
        return self._mapping

    def ring(self) -> None:
        """Wake the owner."""
        self._mapped().ring()

    @property
    def pid(self) -> int:
        """The owner's process id; 0: not attached yet."""
        return self._mapped().words()[0]

    @property
    def phase(self) -> Phase:
        return Phase(self._mapped().words()[1])

    @property
    def heartbeat_ns(self) -> int:
        """``time.monotonic_ns()`` of the owner's last beat; 0: none yet."""
        return self._mapped().words()[2]

    def observer(self) -> DoorbellObserverEnd:
        """For a process that shows the counters."""
        return DoorbellObserverEnd.of(self.name, self._page.fileno())

    def close(self) -> None:
        """Drop this process's descriptors. Attached objects have their own."""
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None
        self._page.close()
        self._event.close()

    def __reduce__(self) -> tuple[type[DoorbellHandle], tuple[str, str, Descriptor, Descriptor]]:
        return type(self), (self.name, self.transport, self._page, self._event)


def create_doorbell(name: str, *, transport: Transport = "auto") -> DoorbellHandle:
    """A new doorbell for the process called ``name``, all of whose channels are of one transport. Raises
    TransportUnavailable, and OSError when there is no memory for it."""
    chosen = choose_transport(transport)
    page = Descriptor(create_sealed_memfd(f"ringserve-doorbell-{name}", PAGE_SIZE))
    format_bell(page.fileno())
    return DoorbellHandle(name, chosen, page, Descriptor(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)))


class Doorbell:
    """The owner's side. One for each process, used from one thread (``ring`` from any)."""

    def __init__(self, name: str, bell: SocketBell) -> None:
        self.name = name
        self._bell = bell
        bell.claim(os.getpid())

    @classmethod
    def attach(cls, handle: DoorbellHandle) -> Doorbell:
        """Become the owner: writes this process's pid into the page. Raises AttachError if it has an owner."""
        return cls(handle.name, handle.open_bell())

    def fileno(self) -> int:
        """Readable when rung: the eventfd, or for sockets an epoll that holds it. For ``loop.add_reader``; remove the
        reader before ``close``."""
        return self._bell.fileno()

    def clear(self) -> None:
        """Take the ring off the descriptor. Before draining, never after."""
        self._bell.clear()

    def arm(self, consumers: Sequence[Consumer], producers: Sequence[Producer] = ()) -> bool:
        """About to sleep. True: safe to block, whatever comes will ring; over sockets, so does what has come since the
        ends were last looked at. False: a consumer has something to drain, or a producer that found no room has some
        now (or lost its peer); the doorbell is disarmed. Only the ends given here ring it from now on."""
        return self._bell.arm(consumers, producers)

    def allow_spin(self, microseconds: int) -> None:
        """Let ``arm`` look around for so long before it sleeps (at most MAX_SPIN_US; 0: not at all). It does so only
        while sleeps have lately been that short. Only for processes that have a core of their own."""
        if not 0 <= microseconds <= MAX_SPIN_US:
            raise ValueError(f"a spin lasts 0 to {MAX_SPIN_US} microseconds, not {microseconds}")
        self._bell.set_spin(microseconds * 1000)

    def disarm(self) -> None:
        """Awake for another reason than being rung: spares the neighbours a system call."""
        self._bell.disarm()

    def wait(self, timeout: float | None = None, watch: Sequence[int] = ()) -> tuple[int, ...]:
        """Block until rung, until a descriptor of ``watch`` is readable, or for ``timeout`` seconds; the readable ones
        of ``watch`` are returned. Clears and disarms. Lets other threads run. Signal handlers run meanwhile; if they
        do not raise, waiting goes on (a handler may ``ring``)."""
        return self._bell.wait(timeout, watch)

    @property
    def phase(self) -> Phase:
        return Phase(self._bell.words()[1])

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self._bell.set_phase(phase)

    def beat(self, now_ns: int) -> None:
        """Store the heartbeat: ``time.monotonic_ns()``."""
        self._bell.beat(now_ns)

    @property
    def pid(self) -> int:
        return self._bell.words()[0]

    def ring(self) -> None:
        """Wake the owner, from another thread or a signal handler."""
        self._bell.ring()

    def statistics(self) -> DoorbellStatistics:
        pid, phase, heartbeat_ns, _ = self._bell.words()
        arms, refused_arms, waits, wakes, _, spurious_wakes, spins = self._bell.counters()
        return DoorbellStatistics(
            self.name, pid, Phase(phase), heartbeat_ns, arms, refused_arms, waits, wakes, spurious_wakes, spins
        )

    def close(self) -> None:
        """Unmap and close. The page's phase becomes ``closed``."""
        if self._bell.is_open():
            self._bell.set_phase(Phase.closed)
        self._bell.close()
