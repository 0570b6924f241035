"""The actors' processes as their parent holds them: start, reports, and how they end.

Both the supervisor of a server and the offline engine are such a parent.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import signal
import threading
import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from multiprocessing.connection import Connection

import msgspec

from ringserve.child import EXIT_PEER_DIED, run_actor
from ringserve.messages.startup import Progress, Started, StartFailed, SupervisorInbound
from ringserve.spawn import ChildProcess
from ringserve.wiring import Role, Wiring

LAST_WORDS = 0.8
"""Seconds the processes around a dead one get to end by themselves: the first to be seen gone may not be the first
that died."""


@dataclass
class Child:
    """A running process, and where its reports come from."""

    role: str
    process: ChildProcess
    reports: Connection
    started: Started | None = None


class Children:
    """All processes that one parent has started."""

    def __init__(self) -> None:
        self._children: list[Child] = []
        self._decoder = msgspec.msgpack.Decoder(SupervisorInbound)
        self._failure: str | None = None
        self._dropping = threading.Lock()
        """An exiting interpreter closes while a daemon thread may see the same end: a descriptor is closed once."""

    def start(self, role: Role, wiring: Wiring, log_level: str) -> None:
        """Start one more."""
        receiver, sender = multiprocessing.Pipe(duplex=False)
        with sender:
            try:
                process = ChildProcess(f"ringserve-{role.name}", run_actor, wiring.spec(role, sender, log_level))
            except BaseException:
                receiver.close()
                raise
        self._children.append(Child(role.name, process, receiver))

    def pids(self) -> dict[str, int]:
        """Process ids by role."""
        return {child.role: child.process.pid for child in self._children}

    def child(self, role: str) -> Child:
        return next(child for child in self._children if child.role == role)

    def watched(self) -> list[int]:
        """Descriptors that become readable when there is a report, or when a process has ended."""
        reports = [child.reports.fileno() for child in self._children if not child.reports.closed]
        return [*reports, *self.sentinels()]

    def sentinels(self) -> list[int]:
        """Descriptors that become readable when a process has ended."""
        return [child.process.sentinel for child in self._children]

    def read_reports(self, ready: Container[object], on_progress: Callable[[str, float], None]) -> None:
        """Read one report of each process that has one; ``ready``: readable descriptors."""
        for child in self._children:
            if not child.reports.closed and child.reports.fileno() in ready:
                self._read_report(child, on_progress)

    def fallen(self, ready: Container[object]) -> Child | None:
        """A process that has ended."""
        return next((child for child in self._children if child.process.sentinel in ready), None)

    def living(self) -> list[int]:
        """Sentinels of those that have not ended."""
        return [child.process.sentinel for child in self._children if child.process.exitcode is None]

    def failed(self) -> Child | None:
        """A process that has ended out of order."""
        return next((child for child in self._children if child.process.exitcode), None)

    @property
    def all_started(self) -> bool:
        return all(child.started for child in self._children)

    def summary(self) -> dict[str, str | int | float]:
        """What all of them said when they had started."""
        merged: dict[str, str | int | float] = {}
        for child in self._children:
            assert child.started is not None
            merged |= child.started.summary
        return merged

    def explain(self, first: Child, consequence: str = "") -> str:
        """Why ``first`` (or the process that made it end) ended, in one line; ``consequence`` follows a death."""
        first.process.join(LAST_WORDS)
        first = self._culprit(first)
        for child in self._children:  # whatever was reported before the end
            while not child.reports.closed and child.reports.poll():
                self._read_report(child, _ignore)
        if self._failure is not None:
            return self._failure
        return f"the {first.role} process (pid {first.process.pid}) {_how(first.process.exitcode)}{consequence}"

    def terminate(self, role: str) -> None:
        process = self.child(role).process
        if process.exitcode is None:
            process.terminate()

    def end(self, names: tuple[str, ...], grace: float) -> None:
        """They end by themselves when their neighbour has; after ``grace`` seconds by SIGKILL."""
        deadline = time.monotonic() + grace
        for child in self._children:
            if child.role in names:
                child.process.join(max(0.0, deadline - time.monotonic()))
                _kill(child.process)

    def close(self) -> None:
        """Kill what still runs, and drop all descriptors."""
        for child in self._children:
            _kill(child.process)
            child.process.close()
            self._drop_reports(child)
        self._children.clear()

    def _drop_reports(self, child: Child) -> None:
        with self._dropping:
            child.reports.close()

    def _read_report(self, child: Child, on_progress: Callable[[str, float], None]) -> None:
        try:
            report = self._decoder.decode(child.reports.recv_bytes())
        except EOFError:
            self._drop_reports(child)
            return
        match report:
            case Progress(stage, fraction):
                on_progress(stage, fraction)
            case Started():
                child.started = report
            case StartFailed(message):
                self._failure = message

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


def _ignore(_stage: str, _fraction: float) -> None:
    """Nobody waits for the start any more."""


def _kill(process: ChildProcess) -> None:
    if process.exitcode is None:
        process.kill()
        process.join()


def _how(exitcode: int | None) -> str:
    if exitcode is None:
        return "closed its end"
    if exitcode < 0:
        return f"was killed by {signal.Signals(-exitcode).name}"
    return f"ended with status {exitcode}"
