"""The skeleton's blocking drive: the scheduler and the executor."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from ringserve.actor import BlockingActor, Mailbox
from ringserve.shm import ChannelClosed, Phase


def run_blocking(actor: BlockingActor, mailbox: Mailbox) -> None:
    """Run ``actor`` until SIGTERM, or until a neighbour that had said goodbye is gone.

    Raises:
        PeerDied: a neighbour died.
    """
    stopped = False

    def stop(_signum: int, _frame: object) -> None:
        nonlocal stopped
        stopped = True

    # The handler alone could run between the check of `stopped` and the wait; the byte in the pipe cannot be missed.
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, stop)
    try:
        actor.startup()
        mailbox.doorbell.phase = Phase.ready
        while not stopped and _turn(actor, mailbox, wake_read):
            pass
        actor.shutdown()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        os.close(wake_read)
        os.close(wake_write)


def _turn(actor: BlockingActor, mailbox: Mailbox, wake: int) -> bool:
    """Drain, act, flush, wait. False: a neighbour has said goodbye, and nothing more can come of it."""
    try:
        mailbox.drain(actor.handle)
        busy = actor.act()
        mailbox.flush()
        if busy or not mailbox.arm():
            return True
    except ChannelClosed:
        return False
    return not _peer_left(mailbox, mailbox.doorbell.wait(None, _watched(mailbox, wake)), actor.handle)


def _watched(mailbox: Mailbox, wake: int) -> list[int]:
    watched = [wake]
    for peer in mailbox.peers:
        peer.attach()
        if peer.pidfd is not None:
            watched.append(peer.pidfd)
    return watched


def _peer_left(mailbox: Mailbox, readable: tuple[int, ...], handle: Callable[[object, str], None]) -> bool:
    """True when a neighbour ended in order; what it had sent is handled first."""
    for peer in mailbox.peers:
        if peer.pidfd in readable:
            if not peer.left_in_peace:
                mailbox.drain(handle)
                raise peer.died()
            return True
    return False
