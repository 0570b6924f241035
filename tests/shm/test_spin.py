"""Spinning before sleep: only where it pays, and never instead of the handshake."""

from __future__ import annotations

import os
import threading

import pytest
from shm_workshop import Workshop

from ringserve import wiring
from ringserve.shm import MAX_SPIN_US


def test_spin_is_bounded(workshop: Workshop) -> None:
    link = workshop.link()
    for wrong in (-1, MAX_SPIN_US + 1):
        with pytest.raises(ValueError):
            link.sink.allow_spin(wrong)
    link.sink.allow_spin(MAX_SPIN_US)
    assert link.sink.arm([link.consumer]), "an empty ring is slept on, spin or not"
    assert link.sink.statistics().spins == 0


def test_what_comes_during_the_spin_needs_no_doorbell(ring_workshop: Workshop) -> None:
    """After short sleeps the sleeper looks around first; what it sees then was not rung for."""
    link = ring_workshop.link()
    link.sink.allow_spin(MAX_SPIN_US)
    for _ in range(8):  # sleeps that end at once: the spin grows
        assert link.sink.arm([link.consumer])
        link.sink.ring()
        link.sink.wait(30)
    link.producer.put_nowait(b"x")
    link.producer.flush()
    assert not link.sink.arm([link.consumer])
    assert link.producer.statistics().doorbell_writes == 0
    assert link.sink.statistics().spins == 1
    assert link.consumer.drain() == [b"x"]


def test_long_sleeps_end_the_spinning(ring_workshop: Workshop) -> None:
    link = ring_workshop.link()
    link.sink.allow_spin(MAX_SPIN_US)
    for _ in range(12):  # nobody rings: each wait is a thousand times longer than a spin
        assert link.sink.arm([link.consumer])
        link.sink.wait(0.005)
    link.producer.put_nowait(b"x")
    link.producer.flush()
    assert not link.sink.arm([link.consumer])
    assert link.sink.statistics().spins == 0, "found by the recheck, not by spinning"


def test_nothing_is_lost_with_spin(ring_workshop: Workshop) -> None:
    """Many short sleeps and spins against a thread that publishes."""
    link = ring_workshop.link(1 << 16)
    link.sink.allow_spin(MAX_SPIN_US)
    count = 5000
    taken = threading.Semaphore(4)

    def produce() -> None:
        for _ in range(count):
            taken.acquire()
            link.producer.put_nowait(b"")
            link.producer.flush()

    thread = threading.Thread(target=produce)
    thread.start()
    got = 0
    while got < count:
        if messages := link.consumer.drain():
            got += len(messages)
            taken.release(len(messages))
        elif link.sink.arm([link.consumer]):
            wakes = link.sink.statistics().wakes
            link.sink.wait(60)
            assert link.sink.statistics().wakes > wakes, "nobody rang"
    thread.join()


def test_it_turns_itself_off_where_processors_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3})
    assert wiring.worthwhile_spin(20, 4) == 20
    assert wiring.worthwhile_spin(0, 4) == 0
    assert wiring.worthwhile_spin(20, 5) == 0
