"""A child process from its first instruction to its exit code.

The supervisor starts every actor by module name (``ActorSpec.module``), so that it never imports what they need. The
actor's module has one function, ``create(context)``.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from ringserve.actor import ActorContext, Mailbox, Peer
from ringserve.actor_blocking import run_blocking
from ringserve.logs import set_up_logging
from ringserve.messages.rings import RINGS
from ringserve.messages.startup import SupervisorInbound
from ringserve.process_signals import HELD_SIGNALS
from ringserve.shm import (
    Consumer,
    ConsumerEnd,
    Doorbell,
    DoorbellHandle,
    DoorbellObserverEnd,
    PeerDied,
    Producer,
    ProducerEnd,
    Receiver,
    RingObserverEnd,
    Sender,
    open_pidfd,
)

EXIT_PEER_DIED = 3
"""Exit status of an actor that ended because a neighbour died; the supervisor tells of the neighbour."""

logger = logging.getLogger("ringserve")


@dataclass(frozen=True)
class ActorSpec:
    """Everything a child is born with; pickled once, while it is spawned."""

    role: str
    module: str
    on_loop: bool
    """Runs on uvloop (frontend, tokenizer), not on a blocking wait."""
    at_the_edge: bool
    """SIGTERM tells it to finish what runs (frontend)."""
    settings: Any
    doorbell: DoorbellHandle
    inbox: tuple[tuple[str, ConsumerEnd], ...]
    outbox: tuple[tuple[str, ProducerEnd], ...]
    peers: tuple[tuple[str, DoorbellHandle], ...]
    reports: Connection
    """To the supervisor."""
    supervisor_pid: int
    log_level: str
    observers: tuple[RingObserverEnd | DoorbellObserverEnd, ...] = ()
    """The frontend's: what /metrics shows."""
    spin_us: int = 0
    """How long a blocking actor may look around before it sleeps."""


def run_actor(spec: ActorSpec) -> NoReturn:
    """The child's main function; ends the process with its exit status."""
    # Ctrl-C reaches the whole foreground group, and service managers send SIGTERM to every process of a service: only
    # the supervisor decides what it means. It tells the process at the edge; the others end when their neighbour says
    # goodbye.
    for number in HELD_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)
    _name_process(spec.role)
    set_up_logging(spec.role, spec.log_level)
    _end_with(spec.supervisor_pid)
    mailbox = open_mailbox(spec.role, spec.doorbell, spec.inbox, spec.outbox, spec.peers)
    try:
        if spec.on_loop:
            _run_on_loop(spec, mailbox)
        else:
            mailbox.doorbell.allow_spin(spec.spin_us)
            context = _context(spec, mailbox, mailbox.flush)
            run_blocking(importlib.import_module(spec.module).create(context), mailbox)
    except PeerDied as error:
        # No goodbye, and no tidying up: the neighbours must see a death, and at once, so that clients can be told.
        logger.debug("ending: %s", error)
        os._exit(EXIT_PEER_DIED)
    except Exception:
        logger.exception("a fault in ringserve ended the %s process", spec.role)
        os._exit(1)
    except SystemExit as end:  # it could not start, and has said why
        _leave(end.code if isinstance(end.code, int) else 1)
    mailbox.close()
    _leave(0)


def _leave(status: int) -> NoReturn:
    """End at once. Taking an interpreter down that holds torch costs a second of processor time and more, and there is
    nothing left to tidy up."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(status)


def _run_on_loop(spec: ActorSpec, mailbox: Mailbox) -> None:
    import uvloop  # not needed by the blocking actors

    from ringserve.actor_async import AsyncDriver

    async def live() -> None:
        driver = AsyncDriver(mailbox)
        actor = importlib.import_module(spec.module).create(_context(spec, mailbox, driver.flush_soon))
        gc.freeze()  # what start-up made stays; the collector need not walk it while serving
        await driver.run(actor, stop_on_sigterm=spec.at_the_edge)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(live())


def _context(spec: ActorSpec, mailbox: Mailbox, flush_soon: Any) -> ActorContext:
    encoder = msgspec.msgpack.Encoder()

    def report(message: SupervisorInbound) -> None:
        try:
            spec.reports.send_bytes(encoder.encode(message))
        except BrokenPipeError:
            logger.debug("the supervisor is gone")

    observers = tuple(end.attach() for end in spec.observers)
    for end in spec.observers:
        end.close()
    return ActorContext(spec.role, spec.settings, mailbox.senders, report, flush_soon, observers)


def open_mailbox(
    role: str,
    doorbell: DoorbellHandle,
    inbox: Iterable[tuple[str, ConsumerEnd]],
    outbox: Iterable[tuple[str, ProducerEnd]],
    peers: Iterable[tuple[str, DoorbellHandle]],
) -> Mailbox:
    """Attach this process's doorbell and its ends of the rings, and tell the neighbours."""
    kind = role.partition("-")[0]
    mailbox = Mailbox(
        Doorbell.attach(doorbell),
        {source: Receiver(Consumer.attach(end), RINGS[source.partition("-")[0], kind]) for source, end in inbox},
        {target: Sender(Producer.attach(end)) for target, end in outbox},
        [Peer(name, handle) for name, handle in peers],
    )
    mailbox.greet()
    return mailbox


def _name_process(role: str) -> None:
    Path("/proc/self/comm").write_text(f"rs-{role}")


def _end_with(supervisor_pid: int) -> None:
    """End this process as soon as the supervisor is gone, even in the middle of loading a model.

    A thread that blocks in poll costs nothing and, unlike PR_SET_PDEATHSIG, does not end the process when merely the
    supervisor's starting thread ends.
    """
    try:
        pidfd = open_pidfd(supervisor_pid)
    except ProcessLookupError:
        os._exit(EXIT_PEER_DIED)
    if os.getppid() != supervisor_pid:  # it died before the pidfd was open
        os._exit(EXIT_PEER_DIED)

    def wait() -> None:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        poller.poll()
        os._exit(EXIT_PEER_DIED)

    threading.Thread(target=wait, name="supervisor-watch", daemon=True).start()
