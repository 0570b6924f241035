"""A server that is started by a command for a measurement, and ended with everything that it started."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Self

from ringserve.bench.http_client import Endpoint
from ringserve.bench.measure import ServerUnusable, find_model
from ringserve.bench.processes import ProcessTree


def split_command(text: str) -> list[str]:
    """As a shell would, without its other powers.

    Raises:
        ValueError: an open quotation mark, or no port to listen on.
    """
    words = shlex.split(text)
    if "{port}" not in text:
        raise ValueError(f"{text!r} has no {{port}} to listen on")
    return words


class CommandServer:
    """Runs ``command`` in a process group of its own; ``{port}`` in it becomes a free port.

    No shell: variables are set with ``env NAME=VALUE command``. Its output goes to a file, whose end is
    shown if it fails.
    """

    def __init__(self, command: str | Sequence[str], api_key: str | None = None) -> None:
        words = split_command(command) if isinstance(command, str) else list(command)
        port = free_port()
        self.endpoint = Endpoint.parse(f"http://127.0.0.1:{port}/v1", api_key)
        # closed by stop(): it outlives this call
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.started = time.perf_counter()
        try:
            self._process = subprocess.Popen(
                [word.replace("{port}", str(port)) for word in words],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            self._output.close()
            raise ServerUnusable(f"{words[0]}: {error.strerror}") from error

    @property
    def tree(self) -> ProcessTree:
        """Its processes."""
        return ProcessTree(self._process.pid)

    def wait_until_ready(self, timeout: float) -> str:
        """Wait until it lists its models; returns the first one.

        Raises:
            ServerUnusable: it ended, or took too long.
        """
        try:
            return find_model(self.endpoint, wait=timeout, check=self._check)
        except ServerUnusable as error:
            raise ServerUnusable(f"{error}\n{self.last_output()}".rstrip()) from None

    def _check(self) -> None:
        status = self._process.poll()
        if status is not None:
            raise ServerUnusable(f"the server ended with status {status} before it was ready")

    def last_output(self) -> str:
        """The last lines it printed."""
        size = os.fstat(self._output.fileno()).st_size
        text = os.pread(self._output.fileno(), 4000, max(0, size - 4000)).decode(errors="replace")
        return "\n".join(text.splitlines()[-15:])

    def stop(self, patience: float = 30.0) -> None:
        """SIGTERM, and after ``patience`` seconds SIGKILL; then the rest of its process group."""
        try:
            if self._process.poll() is None:
                self._process.terminate()
                self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
        finally:
            with contextlib.suppress(ProcessLookupError):  # nobody is left
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._output.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.stop()


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
