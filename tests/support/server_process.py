"""A real server in processes of its own, as a user starts it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

ROLES = ("frontend-0", "tokenizer-0", "scheduler", "executor")
START_TIMEOUT = 120.0


class ServerFailed(Exception):
    """The server ended before it was ready; the message is its output."""


class Server:
    """``ringserve serve`` on a free port of 127.0.0.1.

    Ends by ``stop``, or by leaving the context; output is kept in ``output()``.
    """

    def __init__(self, *arguments: str, wait: bool = True, port: int = 0) -> None:
        # closed by kill(): it outlives this call
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ringserve", "serve", *arguments, "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.url = ""
        if wait:
            try:
                self.wait_until_ready()
            except BaseException:
                self.kill()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.kill()

    def output(self) -> str:
        """Everything printed so far."""
        return os.pread(self._log.fileno(), 1 << 24, 0).decode(errors="replace")

    def wait_until_ready(self) -> None:
        """Wait for the line that ends the start.

        Raises:
            ServerFailed: the server ended, or took more than two minutes.
        """
        deadline = time.monotonic() + START_TIMEOUT
        while not (match := re.search(r"^ringserve: serving .* at (http://\S+) ", self.output(), re.MULTILINE)):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise ServerFailed(self.output())
            time.sleep(0.05)
        self.url = match[1]

    @property
    def pids(self) -> dict[str, int]:
        """The actors' process ids by role."""
        found = {}
        for pid in descendants(self.process.pid):
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            if name.startswith("rs-"):
                # the kernel cuts names at 15 characters
                found[next(role for role in ROLES if f"rs-{role}"[:15] == name)] = pid
        return found

    def stop(self, signum: int = signal.SIGTERM, timeout: float = 60.0) -> int:
        """Send ``signum`` and wait for the exit status."""
        self.process.send_signal(signum)
        return self.process.wait(timeout)

    def kill(self) -> None:
        """End it at once, whatever state it is in."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._log.close()


def descendants(pid: int) -> list[int]:
    """Process ids of all living descendants."""
    found: list[int] = []
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except FileNotFoundError:
        return found
    for task in tasks:
        try:
            children = (task / "children").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        for child in map(int, children):
            found += [child, *descendants(child)]
    return found


def wait_for_end(pids: Sequence[int], timeout: float = 30.0) -> list[int]:
    """Wait until none of the processes lives (zombies do not count as living); returns those that still do."""
    deadline = time.monotonic() + timeout
    while True:
        living = [pid for pid in pids if _lives(pid)]
        if not living or time.monotonic() > deadline:
            return living
        time.sleep(0.02)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
