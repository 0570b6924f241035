"""The processes of a local server, found from its port, and what they use. Reads /proc; Linux only."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_LISTEN = "0A"


@dataclass(frozen=True)
class ProcessTree:
    """A process and all of its descendants, looked up at each call: they come and go."""

    root: int

    def pids(self) -> list[int]:
        """Living members."""
        return [self.root, *descendants(self.root)]

    def alive(self) -> bool:
        """Whether its root is."""
        return bool(fields := _stat(self.root)) and fields[0] not in ("Z", "X")

    def cpu_seconds(self) -> float:
        """User and system time so far, ended and reaped children included."""
        total = 0
        for pid in self.pids():
            if fields := _stat(pid):
                total += sum(int(field) for field in fields[11:15])
        return total / _TICKS

    def resident_bytes(self) -> int:
        """Sum of the members' resident sets; memory that they share counts for each of them."""
        total = 0
        for pid in self.pids():
            if fields := _stat(pid):
                total += int(fields[21]) * _PAGE
        return total


def find_server(host: str, port: int) -> ProcessTree | None:
    """The tree of the server that listens on ``host:port``; None if it is not on this machine or not ours to see.

    The root is the listener's highest ancestor of the same process group that is not also an ancestor of this process:
    a supervisor, not the shell that started it.
    """
    if not is_local(host):
        return None
    inodes = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    listeners = [pid for pid in _all_pids() if inodes and inodes & set(_open_sockets(pid))]
    ours = {os.getpid(), *ancestors(os.getpid())}
    listeners = [pid for pid in listeners if pid not in ours]
    if not listeners:
        return None
    root = min(listeners, key=lambda pid: len(ancestors(pid)))
    group = _group(root)
    for parent in ancestors(root):
        if parent == 1 or parent in ours or _group(parent) != group:
            break
        root = parent
    return ProcessTree(root)


def is_local(host: str) -> bool:
    """Whether an address is one of this machine's."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind((address[0], 0))
                return True
        except OSError:
            continue
    return False


def ancestors(pid: int) -> list[int]:
    """Parent first."""
    found: list[int] = []
    while (fields := _stat(pid)) and (pid := int(fields[1])) > 0:
        found.append(pid)
    return found


def descendants(pid: int) -> list[int]:
    """All living ones."""
    found: list[int] = []
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for task in tasks:
        try:
            children = Path(f"/proc/{pid}/task/{task}/children").read_text().split()
        except OSError:
            continue
        for child in map(int, children):
            found += [child, *descendants(child)]
    return found


def machine_cpu_seconds() -> float:
    """CPU seconds spent by everybody on this machine since it started."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    idle = fields[3] + fields[4]
    return (sum(fields[:8]) - idle) / _TICKS


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on (index 0 is field 3); empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _group(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[2]) if fields else -1


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _open_sockets(pid: int) -> list[str]:
    links = []
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                links.append(os.readlink(f"/proc/{pid}/fd/{name}"))
            except OSError:
                continue  # closed meanwhile
    except OSError:
        return []  # ended meanwhile, or another user's
    return links


def _listening_inodes(port: int) -> set[str]:
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(fields[9])
    return found
