"""A local server's processes, found from its port."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from ringserve.bench.processes import find_server


def test_the_server_of_a_port_is_found(command: str) -> None:
    with subprocess.Popen([*command.replace("{port}", "0").split()[:2], "0"]) as process:
        try:
            port = 0
            while not port:  # the script took a free port; the kernel knows which
                port = _listening_port(process.pid)
            tree = find_server("127.0.0.1", port)
            assert tree is not None
            assert tree.root == process.pid
            assert tree.resident_bytes() > 1 << 20
            assert tree.cpu_seconds() >= 0.0
        finally:
            process.kill()
    assert find_server("127.0.0.1", port) is None
    assert find_server("nowhere.invalid", 80) is None


def _listening_port(pid: int) -> int:
    links = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            links.add(os.readlink(f"/proc/{pid}/fd/{name}"))
        except FileNotFoundError:
            continue
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in links:
            return int(fields[1].rpartition(":")[2], 16)
    return 0
