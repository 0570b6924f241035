"""A ringserve in processes of its own, to be measured."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit


class BenchServer:
    """``ringserve serve`` on a free port; its start-up output goes to this terminal's stderr."""

    model = "SmolLM2-135M-Instruct"

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ringserve", "serve", *arguments, "--port", "0", "--log-level", "warning"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        match = re.search(r"at (http://\S+) ", line)
        if match is None:
            self._process.kill()
            raise RuntimeError(f"the server did not start: {line}")
        self.url = match[1]
        address = urlsplit(self.url)
        self.host, self.port = address.hostname or "", address.port or 0

    def pids(self) -> list[int]:
        """The supervisor and its children."""
        pid = self._process.pid
        return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()
