"""Children as the actors are started: what they get, and what they do not."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import spawned
from open_descriptors import descriptors
from server_process import descendants

from ringserve.shm.descriptors import Descriptor
from ringserve.spawn import ChildProcess


def ask(function: Callable[..., object], *arguments: object) -> Any:
    """What ``function`` sends through the connection that it gets first."""
    receiver, sender = Pipe(duplex=False)
    with receiver:
        with sender:
            child = ChildProcess("asked", function, sender, *arguments)
        try:
            assert receiver.poll(60)
            answer = receiver.recv()
            child.join()
            assert child.exitcode == 0
        finally:
            child.kill()
            child.join()
            child.close()
    return answer


def test_descriptors_are_handed_over_and_nothing_else() -> None:
    before = descriptors()
    reader, writer = os.pipe()
    unrelated, other = os.pipe()
    os.set_inheritable(unrelated, True)
    handed_over = Descriptor(writer)
    names = ask(spawned.write_and_list, handed_over, handed_over)
    assert os.read(reader, 10) == b"same"
    assert os.readlink(f"/proc/self/fd/{unrelated}") not in names
    assert "/dev/null" in names
    handed_over.close()
    for fd in (reader, unrelated, other):
        os.close(fd)
    assert descriptors() <= before


def test_the_users_script_is_not_run_again_and_nobody_else_is_started() -> None:
    main_file, children, path = ask(spawned.describe)
    assert main_file is None
    assert children == []
    assert path == sys.path
    assert [pid for pid in descendants(os.getpid()) if "asked" in Path(f"/proc/{pid}/cmdline").read_text()] == []


def test_signals_wait_until_the_child_has_decided() -> None:
    receiver, sender = Pipe(duplex=False)
    with receiver, sender:
        child = ChildProcess("waiting", spawned.report_blocked_and_wait, sender)
        child.terminate()
        os.kill(child.pid, signal.SIGINT)
        assert receiver.poll(60)
        assert set(receiver.recv()) >= {signal.SIGINT, signal.SIGTERM}
        assert child.exitcode is None
        assert not select.select([child.sentinel], [], [], 0)[0]
        child.kill()
        child.join()
        assert select.select([child.sentinel], [], [], 0)[0]
        assert child.exitcode == -signal.SIGKILL
        child.close()
        child.close()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGINT, signal.SIGTERM}


def test_what_cannot_be_pickled_leaves_nothing() -> None:
    before = descriptors()
    with pytest.raises(Exception, match="pickle"):
        ChildProcess("never", lambda: None)
    assert descriptors() <= before
