"""Processes that do nothing but compute, as a machine with other work has them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

_PROGRAM = """import os, sys
parent = int(sys.argv[1])
while os.getppid() == parent:  # the measuring process may be killed, even before this line
    for _ in range(1_000_000):
        pass
"""


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[list[int]]:
    """Run ``count`` of them; their process ids."""
    processes = [subprocess.Popen([sys.executable, "-P", "-c", _PROGRAM, str(os.getpid())]) for _ in range(count)]
    try:
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
