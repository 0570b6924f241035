"""Functions that tests run in children."""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing import active_children
from multiprocessing.connection import Connection

from ringserve.shm.descriptors import Descriptor


def write_and_list(sender: Connection, first: Descriptor, second: Descriptor) -> None:
    """Say whether both are one descriptor, and list what is open."""
    os.write(first.fileno(), b"same" if first is second else b"different")
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue  # the listing's own
    sender.send(names)


def describe(sender: Connection) -> None:
    """The main module's file, this child's children, and its path."""
    sender.send((getattr(sys.modules["__main__"], "__file__", None), active_children(), sys.path))


def report_blocked_and_wait(sender: Connection) -> None:
    """Signals that are held back; then sleep."""
    sender.send(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    while True:
        signal.pause()
