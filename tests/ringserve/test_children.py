"""`ringserve.children`: descriptors are closed once, whoever sees the end first."""

from __future__ import annotations

import multiprocessing
import threading
from typing import Any

import pytest

from ringserve.children import Child, Children


def test_two_threads_that_see_the_end_close_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's exit and a daemon thread's call: the second of them would close another one's descriptor."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    sender.close()
    process: Any = None
    child, children = Child("executor", process, receiver), Children()
    close = receiver._close  # type: ignore[attr-defined]
    entered, go_on, calls = threading.Event(), threading.Event(), []

    def slow_close() -> None:
        calls.append(threading.get_ident())
        entered.set()
        go_on.wait(10)
        if len(calls) == 1:
            close()

    monkeypatch.setattr(receiver, "_close", slow_close)
    threads = [threading.Thread(target=children._read_report, args=(child, lambda stage, part: None))]
    threads[0].start()
    assert entered.wait(10)
    threads.append(threading.Thread(target=children._drop_reports, args=(child,)))
    threads[1].start()
    threads[1].join(0.2)
    go_on.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert len(calls) == 1
    assert receiver.closed
