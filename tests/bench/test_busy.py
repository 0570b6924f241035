"""Busy processes compute, and end with what they were started for."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ringserve.bench.busy import busy_processes


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_they_compute_and_end() -> None:
    with busy_processes(2) as pids:
        assert len(set(pids)) == 2
        while min(map(cpu_ticks, pids)) < 3:  # the suite's time limit is the bound
            pass
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with pytest.raises(RuntimeError), busy_processes(1) as pids:
        raise RuntimeError
    assert not Path(f"/proc/{pids[0]}").exists()
    with busy_processes(0) as none:
        assert none == []


def test_they_end_when_their_parent_was_killed() -> None:
    program = (
        "import time\n"
        "from ringserve.bench.busy import busy_processes\n"
        "with busy_processes(1) as pids:\n"
        "    print(pids[0], flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        pidfd = os.pidfd_open(pid)
        try:
            parent.send_signal(signal.SIGKILL)
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            assert poller.poll(60_000)
        finally:
            os.close(pidfd)
