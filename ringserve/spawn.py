"""Start a Python process that runs one function.

multiprocessing's spawn would first run the user's script again in each child (which needs ``if __name__ == "__main__"``
there, and cannot be done at all in a notebook), and leaves a resource tracker running. These children get the function
by its module's name, its arguments, the descriptors among them, and ``sys.path``; nothing else.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import context, reduction
from typing import Any

from ringserve.process_signals import HELD_SIGNALS
from ringserve.shm import open_pidfd

_BOOTSTRAP = """import pickle, sys
with open(int(sys.argv[1]), "rb") as payload:
    sys.path[:] = pickle.load(payload)
    function, arguments = pickle.load(payload)
function(*arguments)
"""


class PassedDescriptor:
    """A descriptor's number, the same on both sides, in the form in which multiprocessing unpickles one."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def detach(self) -> int:
        return self._fd


class _Passing:
    """Collects the descriptors that are met while the arguments are pickled (the interface is multiprocessing's)."""

    DupFd = PassedDescriptor

    def __init__(self) -> None:
        self.fds: set[int] = set()

    def duplicate_for_child(self, fd: int) -> int:
        self.fds.add(fd)
        return fd


class ChildProcess:
    """A running child. Its standard input is empty, its output goes where ours goes.

    Args:
        name: shown behind the command in lists of processes.
        function: of a module that can be imported in the child; it must unblock ``HELD_SIGNALS``.
        arguments: are pickled; ``Descriptor`` and ``Connection`` objects among them are handed over.
    """

    def __init__(self, name: str, function: Callable[..., object], *arguments: Any) -> None:
        passing: Any = _Passing()
        payload = io.BytesIO()
        pickle.dump(sys.path, payload)
        context.set_spawning_popen(passing)  # of this thread only
        try:
            reduction.ForkingPickler(payload).dump((function, arguments))
        finally:
            context.set_spawning_popen(None)
        reader, writer = os.pipe()
        # Until the function has decided what these mean to its process, they wait: Ctrl-C goes to the whole group.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS)
        try:
            # -P: the two modules that the bootstrap needs never come from the current directory
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOTSTRAP, str(reader), name],
                stdin=subprocess.DEVNULL,
                pass_fds=(reader, *passing.fds),
            )
        except BaseException:
            os.close(writer)
            raise
        finally:
            os.close(reader)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self.pid = self._process.pid
        self.sentinel = open_pidfd(self.pid)
        """Becomes readable when the process ends."""
        with contextlib.suppress(BrokenPipeError), open(writer, "wb") as file:  # it may have died by now
            file.write(payload.getbuffer())

    @property
    def exitcode(self) -> int | None:
        """None: running; negative: killed by that signal."""
        return self._process.poll()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end, at most ``timeout`` seconds."""
        poller = select.poll()
        poller.register(self.sentinel, select.POLLIN)
        if poller.poll(None if timeout is None else timeout * 1000):
            self._process.wait()

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Drop the descriptor of a process that has ended."""
        if self.sentinel >= 0:
            os.close(self.sentinel)
            self.sentinel = -1
