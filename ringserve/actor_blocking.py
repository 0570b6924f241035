"""The skeleton's blocking drive: the scheduler and the executor."""

from __future__ import annotations

from collections.abc import Callable

from ringserve.actor import BlockingActor, Mailbox
from ringserve.shm import ChannelClosed, Phase


def run_blocking(actor: BlockingActor, mailbox: Mailbox) -> None:
    """Run ``actor`` until a neighbour has said goodbye.

    Raises:
        PeerDied: a neighbour died.
    """
    actor.startup()
    mailbox.flush()
    mailbox.doorbell.phase = Phase.ready
    while _turn(actor, mailbox):
        pass
    actor.shutdown()


def _turn(actor: BlockingActor, mailbox: Mailbox) -> bool:
    """Drain, act, flush, wait. False: a neighbour has said goodbye, and nothing more can come of it."""
    try:
        mailbox.drain(actor.handle)
        busy = actor.act()
        mailbox.flush()
        if busy or not mailbox.arm():
            return True
    except ChannelClosed:
        return False
    return not _peer_left(mailbox, mailbox.doorbell.wait(None, _watched(mailbox)), actor.handle)


def _watched(mailbox: Mailbox) -> list[int]:
    watched = []
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
