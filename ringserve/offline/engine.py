"""The processes of one LLM, and the frontend's place among them.

There is no loop of its own here and no thread: messages move while somebody is in ``run``. In between the engine
sleeps, and its answers to what was given up wait in a ring. This module knows no prompts and no parameters.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.connection
import os
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from ringserve.actor import Mailbox
from ringserve.children import LAST_WORDS, Child, Children
from ringserve.config import ModelSource, ServeConfig
from ringserve.messages.requests import Abort
from ringserve.messages.rings import FrontendInbound, FrontendMessage
from ringserve.messages.startup import ExecutorReady, LoadProgress
from ringserve.offline.errors import EngineClosed, EngineDied, EngineError, EngineStartError
from ringserve.offline.interrupts import DeferredInterrupts
from ringserve.progress import StartDisplay
from ringserve.shm import ShmError
from ringserve.wiring import EXECUTOR, FRONTEND, SCHEDULER, TOKENIZER, Wiring, roles

END_AFTER = 5.0
"""Seconds the processes get to end by themselves."""
MAX_PENDING_BYTES = 1024 * 1024
"""Requests are held back while more than this waits for room in the ring."""

logger = logging.getLogger("ringserve")


class Job(Protocol):
    """Something that goes on until it is done: messages out, messages in."""

    @property
    def done(self) -> bool: ...

    def next_message(self) -> FrontendMessage | None:
        """The next one to send; None: nothing now."""

    def handle(self, message: FrontendInbound) -> None:
        """Messages of jobs that were given up come here, too: unknown request ids are nobody's."""

    def request_ids(self) -> Iterable[int]:
        """Those of the unfinished requests: they are aborted when the job is given up."""


class Engine:
    """Tokenizer, scheduler and executor, started and ready.

    Raises:
        EngineStartError: one of them could not start; nothing is left running.
    """

    def __init__(self, config: ServeConfig, source: ModelSource, show_progress: bool) -> None:
        self._pid = os.getpid()
        self._end_reason: EngineError | None = None
        self._last_request_id = 0
        self._closing = False
        self._released = False
        self._runner: int | None = None
        """The thread that is in ``run``."""
        self._ready: ExecutorReady | None = None
        self._children = Children()
        self._wiring = Wiring(config)
        try:
            self._mailbox: Mailbox = self._wiring.open_mailbox(FRONTEND)
        except BaseException:
            self._wiring.close()
            raise
        try:
            with DeferredInterrupts(self._wake) as interrupts:
                self._start(config, source, show_progress, interrupts)
        except BaseException:
            self.destroy()
            raise

    def _start(
        self, config: ServeConfig, source: ModelSource, show_progress: bool, interrupts: DeferredInterrupts
    ) -> None:
        for role in roles(config, source):
            if role.name != FRONTEND:
                self._children.start(role, self._wiring, config.logging.log_level)
        self._wiring.close_channels()
        with StartDisplay(source.name) if show_progress else contextlib.nullcontext() as display:
            on_progress = display.update if display is not None else _no_display
            while self._ready is None or not self._children.all_started:
                try:
                    self._turn(_ignore, on_progress)
                except EngineDied as error:
                    raise EngineStartError(str(error)) from None
                interrupts.check()

    @property
    def ready(self) -> ExecutorReady:
        """What the engine found out when it started."""
        assert self._ready is not None
        return self._ready

    def pids(self) -> dict[str, int]:
        """Process ids by role; empty once the engine has ended."""
        return self._children.pids()

    def new_request_id(self) -> int:
        """Unique in the engine's life; the upper 16 bits are those of the frontend with index 0."""
        self._last_request_id += 1
        return self._last_request_id

    def run(self, job: Job) -> None:
        """Go on until ``job`` is done. If anything is raised meanwhile, its unfinished requests are aborted and the
        engine stays usable.

        Raises:
            EngineDied: a process ended.
            EngineClosed: the engine was closed, perhaps by another thread and just now.
            KeyboardInterrupt: SIGINT (or whatever the user's own handler raises).
        """
        self._require_alive()
        self._runner = threading.get_ident()
        try:
            with DeferredInterrupts(self._wake) as interrupts:
                self._feed(job)
                while not job.done:
                    self._turn(job.handle, _no_display)
                    interrupts.check()
                    if self._closing:
                        raise EngineClosed("the engine was closed while it was working")
                    self._feed(job)
        except BaseException:
            if self._end_reason is None and not self._closing:
                self._give_up(job)
            raise
        finally:
            self._runner = None

    def request_close(self) -> None:
        """From another thread: ``run`` shall end with EngineClosed."""
        self._closing = True
        self._wake()

    def close(self) -> None:
        """End all processes in order. Not while another thread is in ``run``."""
        if self._end_reason is not None or os.getpid() != self._pid:
            return
        self._closing = True
        self._end_reason = EngineClosed("the engine was closed")
        try:
            self._release()  # the goodbye; each neighbour passes it on
            self._children.end((TOKENIZER, SCHEDULER, EXECUTOR), END_AFTER)
        finally:  # also when Ctrl-C ends the waiting
            self._children.close()

    def destroy(self) -> None:
        """End all processes at once; never raises, and does nothing in a process that was forked from the owner's."""
        if os.getpid() != self._pid:
            return
        if self._end_reason is None:
            self._end_reason = EngineClosed("the engine was closed")
        self._children.close()
        if self._runner in (None, threading.get_ident()):  # else: this process ends under a daemon thread's call,
            self._release()  # which still looks at the rings

    def _release(self) -> None:
        """Close our ends of the rings, once."""
        if not self._released:
            self._released = True
            self._mailbox.close()
            self._wiring.close()

    def _wake(self) -> None:
        with contextlib.suppress(ShmError):  # closed meanwhile
            self._mailbox.doorbell.ring()

    def _require_alive(self) -> None:
        if os.getpid() != self._pid:
            raise EngineError("an LLM cannot be used in a process that was forked from the one that made it")
        if self._end_reason is not None:
            raise type(self._end_reason)(*self._end_reason.args) from None  # not the stumble over what is closed

    def _feed(self, job: Job) -> None:
        sender = self._mailbox.senders[TOKENIZER]
        while sender.pending_bytes < MAX_PENDING_BYTES and (message := job.next_message()) is not None:
            sender.send(message)

    def _give_up(self, job: Job) -> None:
        # The answers to these, and what is still on its way, come to a later job, which knows none of the ids.
        try:
            for request_id in job.request_ids():
                self._mailbox.senders[TOKENIZER].send(Abort(request_id))
            self._mailbox.flush()
        except ShmError as error:
            raise self._lost(error) from None

    def _turn(self, handle: Callable[[FrontendInbound], None], on_progress: Callable[[str, float], None]) -> None:
        """Publish what was sent, wait, and handle what came.

        Raises:
            EngineDied: a process ended; nothing is left.
            EngineClosed: this process ends under a daemon thread's call.
        """
        try:
            self._mailbox.flush()
            if self._mailbox.arm():
                ready = self._mailbox.doorbell.wait(None, self._children.watched())
                self._children.read_reports(ready, on_progress)
                fallen = self._children.fallen(ready)
                if fallen is not None:
                    self._require_alive()  # else it was us who ended it
                    raise self._died(fallen)
            self._mailbox.drain(lambda message, _source: self._dispatch(message, handle))
        except ShmError as error:
            raise self._lost(error) from None
        except (OSError, ValueError):  # what was watched is perhaps gone
            self._require_alive()
            raise

    def _dispatch(self, message: FrontendInbound, handle: Callable[[FrontendInbound], None]) -> None:
        match message:
            case ExecutorReady():
                self._ready = message
            case LoadProgress():
                pass  # the same comes as a report
            case _:
                handle(message)

    def _lost(self, error: ShmError) -> EngineDied:
        """A ring failed. Most likely the process at its other end is about to be seen dead."""
        ready = multiprocessing.connection.wait(self._children.sentinels(), LAST_WORDS)
        fallen = self._children.fallen(ready)
        return self._died(fallen) if fallen is not None else self._end(str(error))

    def _died(self, fallen: Child) -> EngineDied:
        return self._end(self._children.explain(fallen))

    def _end(self, reason: str) -> EngineDied:
        """Nothing is left after this."""
        self._end_reason = EngineDied(reason)
        self.destroy()
        return EngineDied(reason)


def _ignore(_message: FrontendInbound) -> None:
    """Nothing was asked yet."""


def _no_display(_stage: str, _fraction: float) -> None:
    """Nobody looks."""
