"""Two ends in one process, children by spawn, and a check that nothing is left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Literal

import pytest
from shm_workshop import Link, Workshop


@pytest.fixture(params=["ring", "socket"])
def transport(request: pytest.FixtureRequest) -> Literal["ring", "socket"]:
    chosen: Literal["ring", "socket"] = request.param
    return chosen


def _held() -> Counter[str]:
    """Descriptors and mappings of the kinds that shm makes."""
    gc.collect()
    held: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the listing's own
            continue
        if target.startswith(("/memfd:", "anon_inode:", "socket:", "pipe:")):
            held[target.split("[")[0] if target.startswith(("socket:", "pipe:")) else target] += 1
    held.update("mapping" for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:ringserve" in line)
    return held


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Every test closes what it opens: descriptors, mappings, processes."""
    resource_tracker.ensure_running()
    before = _held()
    yield
    assert not multiprocessing.active_children()
    assert _held() == before


@pytest.fixture
def workshop(transport: Literal["ring", "socket"]) -> Iterator[Workshop]:
    """For tests that hold on both transports."""
    made = Workshop(transport)
    yield made
    made.close()


@pytest.fixture
def ring_workshop() -> Iterator[Workshop]:
    """For tests of what only the ring has."""
    made = Workshop("ring")
    yield made
    made.close()


@pytest.fixture
def socket_workshop() -> Iterator[Workshop]:
    """For tests of what only the socket pair has."""
    made = Workshop("socket")
    yield made
    made.close()


@pytest.fixture
def pump() -> Callable[[Link, int], list[bytes]]:
    """Take ``count`` messages out; every message must be there already: the doorbell says so, or is rung."""

    def take(link: Link, count: int) -> list[bytes]:
        messages: list[bytes] = []
        while len(messages) < count:
            if link.sink.arm([link.consumer]):
                wakes = link.sink.statistics().wakes
                link.sink.wait(0)
                assert link.sink.statistics().wakes > wakes, f"{len(messages)} of {count} messages came"
            messages += link.consumer.drain()
        return messages

    return take
