"""The supervisor: starts the processes, shows how far they are, passes signals on, and decides the exit status.

It owns every descriptor until the children have theirs, and reads no message but their reports. It never imports
torch, transformers or a web framework.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from ringserve.children import LAST_WORDS, Child, Children
from ringserve.config import ModelSource, ServeConfig
from ringserve.progress import StartDisplay, ready_line
from ringserve.wiring import EXECUTOR, FRONTEND, SCHEDULER, TOKENIZER, Wiring, roles

KILL_AFTER = 5.0
"""Seconds a process gets to end after it was told to, beyond what it may use for running requests."""

logger = logging.getLogger("ringserve")


class Supervisor:
    """One server's life: start, watch, stop."""

    def __init__(self, config: ServeConfig, source: ModelSource) -> None:
        self._config = config
        self._source = source
        self._children = Children()
        self._announced = False

    def run(self) -> int:
        """Serve until told to stop, or until a process dies; returns the exit status.

        0 after SIGTERM or SIGINT, even if requests had to be cut off at ``--shutdown-timeout``; 128 + the signal's
        number after a second signal; 1 when the server could not start or one of its processes died.
        """
        wiring = Wiring(self._config)
        if wiring.transport == "socket" and self._config.transport.transport == "auto":
            logger.warning("the ring extension is not built (is there a C compiler?): using sockets between processes")
        try:
            with _signals() as signals, StartDisplay(self._source.name) as display:
                self._start(wiring)
                return self._watch(signals, display)
        finally:
            self._children.close()
            wiring.close()

    def _start(self, wiring: Wiring) -> None:
        for role in roles(self._config, self._source):
            self._children.start(role, wiring, self._config.logging.log_level)
        wiring.close_channels()

    def _watch(self, signals: Connection, display: StartDisplay) -> int:
        while True:
            ready = multiprocessing.connection.wait([signals, *self._children.watched()])
            self._children.read_reports(ready, display.update)
            if not self._announced and self._children.all_started:
                self._announced = True
                display.close()
                print(ready_line(self._source.name, self._children.summary()), flush=True)
            fallen = self._children.fallen(ready)
            if fallen is not None:
                display.close()
                return self._fall(fallen)
            if signals in ready:
                display.close()
                return self._stop(signals)

    def _fall(self, first: Child) -> int:
        """A process ended that should not have. Its clients get an error, the rest is ended, and one line tells why."""
        reason = self._children.explain(first, "; the server is going down")
        print(f"ringserve: error: {reason}", file=sys.stderr, flush=True)
        self._children.end((FRONTEND,), LAST_WORDS)  # it tells its clients
        self._children.end((TOKENIZER, SCHEDULER, EXECUTOR), 0.0)
        return 1

    def _stop(self, signals: Connection) -> int:
        first = signals.recv_bytes()[0]
        if not self._announced:
            return 0  # nothing is being served; `run` ends the children
        logger.info("stopping: finishing what runs (at most %g s; once more to stop at once)", self._timeout)
        self._children.terminate(FRONTEND)
        deadline = time.monotonic() + self._timeout + KILL_AFTER
        frontend = self._children.child(FRONTEND)
        while frontend.process.exitcode is None and time.monotonic() < deadline:
            watched: list[Connection | int] = [signals, *self._children.living()]
            ready = multiprocessing.connection.wait(watched, max(0.0, deadline - time.monotonic()))
            if signals in ready:
                return 128 + signals.recv_bytes()[0]
            # The others end in order once the frontend has said goodbye, and may be seen to before it is.
            failed = self._children.failed()
            if failed is not None:
                return self._fall(failed)
        if frontend.process.exitcode is None:
            logger.error("the frontend did not end in time")
            return 1
        if frontend.process.exitcode:
            return self._fall(frontend)
        self._children.end((TOKENIZER, SCHEDULER, EXECUTOR), KILL_AFTER)
        logger.info("stopped after %s", signal.Signals(first).name)
        return 0

    @property
    def _timeout(self) -> float:
        return self._config.frontend.shutdown_timeout


@contextmanager
def _signals() -> Iterator[Connection]:
    """SIGTERM, SIGINT and SIGHUP as bytes that can be waited for beside everything else."""
    reader, writer = multiprocessing.Pipe(duplex=False)

    def forward(signum: int, _frame: object) -> None:
        writer.send_bytes(bytes([signum]))

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup: the terminal may go, the server stays
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield reader
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        reader.close()
        writer.close()
