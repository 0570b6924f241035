"""File descriptors with an owner, and the sealed memfds behind rings and doorbells.

Nothing here has a name in a file system, so nothing is left behind whatever dies.
"""

from __future__ import annotations

import fcntl
import os
from multiprocessing import context, reduction
from typing import Any

from ringserve.shm.errors import ChannelClosed, ShmError


def create_sealed_memfd(name: str, size: int) -> int:
    """A memfd of ``size`` zero bytes, mode 0600, that can neither grow nor shrink. Memory is taken now: running out
    is an error here and not a SIGBUS under load."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.posix_fallocate(fd, 0, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_pidfd(pid: int) -> int:
    """A descriptor that becomes readable when the process ends; close-on-exec (pidfd_open always is)."""
    return os.pidfd_open(pid)


class Descriptor:
    """Owns one file descriptor. Pickled while a child is spawned it is handed over to that child; the same object
    referenced twice in one pickle is handed over once."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        if self._fd < 0:
            raise ChannelClosed("this descriptor is closed")
        return self._fd

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        fd = self.fileno()
        if context.get_spawning_popen() is None:
            raise ShmError("descriptors are handed over while a process is being spawned, and in no other way")
        return _received, (reduction.DupFd(fd),)


def _received(handed_over: Any) -> Descriptor:
    fd: int = handed_over.detach()
    os.set_inheritable(fd, False)  # it had to survive exec once; our own children shall not inherit it
    return Descriptor(fd)
