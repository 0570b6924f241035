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
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

import msgspec

from ringserve.child import EXIT_PEER_DIED, run_actor
from ringserve.config import ModelSource, ServeConfig
from ringserve.messages import Progress, Started, StartFailed, SupervisorInbound
from ringserve.progress import StartDisplay, ready_line
from ringserve.wiring import EXECUTOR, FRONTEND, SCHEDULER, TOKENIZER, Wiring, roles

KILL_AFTER = 5.0
"""Seconds a process gets to end after it was told to, beyond what it may use for running requests."""
LAST_WORDS = 0.8
"""Seconds the frontend gets to tell its clients that the server is going down."""

logger = logging.getLogger("ringserve")


@dataclass
class Child:
    """A running process, and where its reports come from."""

    role: str
    process: SpawnProcess
    reports: Connection
    started: Started | None = None


class Supervisor:
    """One server's life: start, watch, stop."""

    def __init__(self, config: ServeConfig, source: ModelSource) -> None:
        self._config = config
        self._source = source
        self._children: list[Child] = []
        self._decoder = msgspec.msgpack.Decoder(SupervisorInbound)
        self._announced = False
        self._failure: str | None = None

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
            for child in self._children:
                self._kill(child)
                child.reports.close()
            wiring.close()

    def _start(self, wiring: Wiring) -> None:
        context = multiprocessing.get_context("spawn")
        for role in roles(self._config, self._source):
            receiver, sender = context.Pipe(duplex=False)
            spec = wiring.spec(role, sender, self._config.logging.log_level)
            process = context.Process(target=run_actor, args=(spec,), name=f"ringserve-{role.name}")
            process.start()
            sender.close()
            self._children.append(Child(role.name, process, receiver))
        wiring.close_channels()

    def _watch(self, signals: Connection, display: StartDisplay) -> int:
        while True:
            reports = [child.reports for child in self._children if not child.reports.closed]
            sentinels = [child.process.sentinel for child in self._children]
            ready = multiprocessing.connection.wait([signals, *reports, *sentinels])
            for child in self._children:
                if child.reports in ready:
                    self._read_report(child, display)
            if not self._announced and all(child.started for child in self._children):
                self._announced = True
                display.close()
                print(ready_line(self._source.name, self._summary()), flush=True)
            for child in self._children:
                if child.process.sentinel in ready:
                    display.close()
                    return self._fall(child, display)
            if signals in ready:
                display.close()
                return self._stop(signals, display)

    def _read_report(self, child: Child, display: StartDisplay) -> None:
        try:
            report = self._decoder.decode(child.reports.recv_bytes())
        except EOFError:
            child.reports.close()
            return
        match report:
            case Progress(stage, fraction):
                display.update(stage, fraction)
            case Started():
                child.started = report
            case StartFailed(message):
                self._failure = message

    def _summary(self) -> dict[str, str | int | float]:
        merged: dict[str, str | int | float] = {}
        for child in self._children:
            assert child.started is not None
            merged |= child.started.summary
        return merged

    def _fall(self, first: Child, display: StartDisplay) -> int:
        """A process ended that should not have. Its clients get an error, the rest is ended, and one line tells why."""
        first.process.join(LAST_WORDS)
        first = self._culprit(first)
        for child in self._children:  # whatever was reported before the end
            while not child.reports.closed and child.reports.poll():
                self._read_report(child, display)
        if self._failure is not None:
            print(f"ringserve: error: {self._failure}", file=sys.stderr, flush=True)
        else:
            print(
                f"ringserve: error: the {first.role} process (pid {first.process.pid}) {_how(first.process.exitcode)}; "
                "the server is going down",
                file=sys.stderr,
                flush=True,
            )
        self._end((FRONTEND,), LAST_WORDS)  # it tells its clients
        self._end((TOKENIZER, SCHEDULER, EXECUTOR), 0.0)
        return 1

    def _culprit(self, first: Child) -> Child:
        """The process that died of itself. Its neighbours end because it is gone, and may be seen first."""
        followers = (None, 0, EXIT_PEER_DIED)
        deadline = time.monotonic() + LAST_WORDS
        while first.process.exitcode in followers:
            for child in self._children:
                if child.process.exitcode not in followers:
                    return child
            living = [child.process.sentinel for child in self._children if child.process.exitcode is None]
            remaining = deadline - time.monotonic()
            if not living or remaining <= 0:
                break
            multiprocessing.connection.wait(living, remaining)
        return first

    def _stop(self, signals: Connection, display: StartDisplay) -> int:
        first = signals.recv_bytes()[0]
        if not self._announced:
            return 0  # nothing is being served; `run` ends the children
        logger.info("stopping: finishing what runs (at most %g s; once more to stop at once)", self._timeout)
        self._terminate(FRONTEND)
        deadline = time.monotonic() + self._timeout + KILL_AFTER
        frontend = next(child for child in self._children if child.role == FRONTEND)
        while frontend.process.exitcode is None and time.monotonic() < deadline:
            sentinels = [child.process.sentinel for child in self._children]
            ready = multiprocessing.connection.wait([signals, *sentinels], max(0.0, deadline - time.monotonic()))
            if signals in ready:
                return 128 + signals.recv_bytes()[0]
            for child in self._children:
                if child is not frontend and child.process.sentinel in ready:
                    return self._fall(child, display)
        if frontend.process.exitcode is None:
            logger.error("the frontend did not end in time")
            return 1
        if frontend.process.exitcode:
            return self._fall(frontend, display)
        self._end((TOKENIZER, SCHEDULER, EXECUTOR), KILL_AFTER)
        logger.info("stopped after %s", signal.Signals(first).name)
        return 0

    @property
    def _timeout(self) -> float:
        return self._config.frontend.shutdown_timeout

    def _terminate(self, role: str) -> None:
        for child in self._children:
            if child.role == role and child.process.exitcode is None:
                child.process.terminate()

    def _end(self, names: tuple[str, ...], grace: float) -> None:
        """They end by themselves when their neighbour has; after ``grace`` seconds by SIGKILL."""
        deadline = time.monotonic() + grace
        for child in self._children:
            if child.role in names:
                child.process.join(max(0.0, deadline - time.monotonic()))
                self._kill(child)

    @staticmethod
    def _kill(child: Child) -> None:
        if child.process.exitcode is None:
            child.process.kill()
            child.process.join()


def _how(exitcode: int | None) -> str:
    if exitcode is None:
        return "closed its end"
    if exitcode < 0:
        return f"was killed by {signal.Signals(-exitcode).name}"
    return f"ended with status {exitcode}"


@contextmanager
def _signals() -> Iterator[Connection]:
    """SIGTERM and SIGINT as bytes that can be waited for beside everything else."""
    reader, writer = multiprocessing.Pipe(duplex=False)

    def forward(signum: int, _frame: object) -> None:
        writer.send_bytes(bytes([signum]))

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield reader
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        reader.close()
        writer.close()
