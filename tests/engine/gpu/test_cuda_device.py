"""The order in which ``CudaDevice`` talks to torch, with a torch.cuda that only takes notes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from ringserve.engine.gpu.device import CudaDevice


class _Stream:
    def __init__(self, log: list[Any], name: str) -> None:
        self._log, self.name = log, name

    def wait_stream(self, other: _Stream) -> None:
        self._log.append((self.name, "waits for", other.name))


class _Graph:
    def __init__(self, log: list[Any]) -> None:
        self._log = log

    def replay(self) -> None:
        self._log.append("replay")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    notes: list[Any] = []
    current = [_Stream(notes, "compute")]
    pools = iter(range(100))

    @contextmanager
    def stream(chosen: _Stream) -> Iterator[None]:
        current.append(chosen)
        yield
        current.pop()

    @contextmanager
    def graph(graph: _Graph, pool: int, stream: _Stream) -> Iterator[None]:
        notes.append(("begin", pool, stream.name))
        current.append(stream)
        try:
            yield
        except Exception:
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904 - as torch does
        finally:
            current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: _Stream(notes, "capture"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", partial(_Graph, notes))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    return notes


def _work(log: list[Any]) -> Callable[[], None]:
    def work() -> None:
        stream: Any = torch.cuda.current_stream(None)
        log.append(("work", stream.name))

    return work


def test_work_runs_once_before_it_is_captured_on_the_same_stream(log: list[Any]) -> None:
    replay = CudaDevice().capture(_work(log))
    replay()
    assert log == [
        ("capture", "waits for", "compute"),
        ("work", "capture"),
        ("compute", "waits for", "capture"),
        ("begin", 0, "capture"),
        ("work", "capture"),
        "replay",
    ]


def test_graphs_share_a_pool_as_long_as_one_of_them_lives(log: list[Any]) -> None:
    device = CudaDevice()
    graphs = [device.capture(_work(log)) for _ in range(2)]
    graphs.pop(0)
    graphs.append(device.capture(_work(log)))
    graphs.clear()
    graphs.append(device.capture(_work(log)))
    assert [entry[1] for entry in log if entry[0] == "begin"] == [0, 0, 0, 1]


def test_memory_that_runs_out_in_a_capture_is_told_as_such(log: list[Any]) -> None:
    runs = iter([None, torch.OutOfMemoryError("CUDA out of memory")])

    def work() -> None:
        error = next(runs)
        if error is not None:
            raise error

    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        CudaDevice().capture(work)

    def broken() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        CudaDevice().capture(broken)
