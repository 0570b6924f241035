"""The skeleton's uvloop drive: the frontend and the tokenizer process."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from ringserve.actor import AsyncActor, Mailbox, Peer
from ringserve.shm import ChannelClosed


class AsyncDriver:
    """Feeds an async actor from its mailbox: one reader on the doorbell, one on each neighbour's pidfd."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[None] = self._loop.create_future()
        self._actor: AsyncActor | None = None
        self._turn_scheduled = False

    def flush_soon(self) -> None:
        """Flush at the end of this loop turn, once, however many messages are sent in it."""
        if not self._turn_scheduled:
            self._turn_scheduled = True
            self._loop.call_soon(self._turn)

    async def run(self, actor: AsyncActor, stop_on_sigterm: bool = False) -> None:
        """Run ``actor`` until it returns. ``stop_on_sigterm``: SIGTERM is a request to stop; else it is left alone.

        Raises:
            PeerDied: a neighbour died.
            Exception: whatever a handler raised; the actor's state is not to be trusted after that.
        """
        self._actor = actor
        if stop_on_sigterm:
            # Not the loop's own handler: closing the loop would bring back the default, which kills.
            signal.signal(signal.SIGTERM, lambda _number, _frame: self._loop.call_soon_threadsafe(actor.request_stop))
        self._loop.add_reader(self._mailbox.doorbell.fileno(), self._on_doorbell)
        self.flush_soon()
        life = asyncio.ensure_future(actor.run())
        try:
            await asyncio.wait((life, self._failure), return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                life.cancel()
                await asyncio.wait((life,), timeout=1.0)
                self._failure.result()
            life.result()
            self._mailbox.flush()
        finally:
            if stop_on_sigterm:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._loop.remove_reader(self._mailbox.doorbell.fileno())
            for peer in self._mailbox.peers:
                if peer.pidfd is not None:
                    self._loop.remove_reader(peer.pidfd)
            if not self._failure.done():
                self._failure.cancel()

    def _on_doorbell(self) -> None:
        self._mailbox.doorbell.clear()
        self._guard(self._attach_peers)
        self._turn()

    def _turn(self) -> None:
        self._turn_scheduled = False
        self._guard(self._one_turn)

    def _one_turn(self) -> None:
        assert self._actor is not None
        try:
            self._mailbox.drain(self._actor.handle)
            self._actor.act()
            self._mailbox.flush()
            if not self._mailbox.arm():
                self.flush_soon()
        except ChannelClosed:  # a neighbour has said goodbye; nothing more can come of it
            self._actor.request_stop()

    def _attach_peers(self) -> None:
        for peer in self._mailbox.peers:
            if peer.attach():
                assert peer.pidfd is not None
                self._loop.add_reader(peer.pidfd, self._on_peer_gone, peer)

    def _on_peer_gone(self, peer: Peer) -> None:
        assert peer.pidfd is not None
        assert self._actor is not None
        self._loop.remove_reader(peer.pidfd)
        if peer.left_in_peace:
            self._actor.request_stop()
            return
        self._guard(self._one_turn)  # what it had sent before it died
        self._fail(peer.died())

    def _guard(self, step: Callable[[], None]) -> None:
        """A callback's exception would only be logged by the loop; here it ends the process."""
        if self._failure.done():
            return
        try:
            step()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self._failure.done():
            self._loop.remove_reader(self._mailbox.doorbell.fileno())  # nobody drains any more: it may stay readable
            self._failure.set_exception(error)
