"""The doorbell by itself: waiting, ringing, what its page says."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Literal

import pytest
from shm_workshop import Workshop

from ringserve.shm import AttachError, Consumer, Doorbell, Phase, Producer, ShmError, create_channel, create_doorbell


@pytest.fixture
def owned(transport: Literal["ring", "socket"]) -> Iterator[tuple[Doorbell, object]]:
    handle = create_doorbell("owned", transport=transport)
    bell = Doorbell.attach(handle)
    yield bell, handle
    bell.close()
    handle.close()


def test_page_tells_pid_phase_and_heartbeat(transport: Literal["ring", "socket"]) -> None:
    handle = create_doorbell("x", transport=transport)
    assert (handle.pid, handle.phase, handle.heartbeat_ns) == (0, Phase.starting, 0)
    bell = Doorbell.attach(handle)
    assert handle.pid == bell.pid == os.getpid()
    bell.phase = Phase.step
    bell.beat(12345678901234567890)
    assert (handle.phase, bell.phase, handle.heartbeat_ns) == (Phase.step, Phase.step, 12345678901234567890)
    bell.close()
    bell.close()
    assert handle.phase is Phase.closed
    with pytest.raises(ShmError):
        bell.arm([])
    handle.close()
    handle.close()


def test_doorbell_has_one_owner(transport: Literal["ring", "socket"]) -> None:
    handle = create_doorbell("x", transport=transport)
    bell = Doorbell.attach(handle)
    with pytest.raises(AttachError, match=str(os.getpid())):
        Doorbell.attach(handle)
    bell.close()
    handle.close()


def test_rings_are_sticky_and_cleared_once(workshop: Workshop) -> None:
    handle = workshop.doorbell("x")
    bell = workshop.keep(Doorbell.attach(handle))
    handle.ring()
    bell.ring()
    assert bell.wait() == ()
    assert bell.wait(0) == ()
    assert bell.statistics().wakes == 1
    handle.ring()
    bell.clear()
    bell.clear()
    assert bell.statistics().wakes == 2
    assert bell.statistics().waits == 2


def test_several_producers_share_one_doorbell(workshop: Workshop) -> None:
    sink = workshop.doorbell("sink")
    bell = workshop.keep(Doorbell.attach(sink))
    producers, consumers = [], []
    for number in range(3):
        source = workshop.doorbell(f"source-{number}")
        channel = workshop.channel(f"c{number}", source, sink)
        producers.append(workshop.keep(Producer.attach(channel.producer_end)))
        consumers.append(workshop.keep(Consumer.attach(channel.consumer_end)))
    assert bell.arm(consumers)
    for number in (2, 0):
        producers[number].put_nowait(b"%d" % number)
        producers[number].flush()
    assert bell.wait() == ()
    assert not bell.arm(consumers)
    assert [consumer.drain() for consumer in consumers] == [[b"0"], [], [b"2"]]
    assert bell.arm(consumers)
    if workshop.transport == "ring":
        assert sum(producer.statistics().doorbell_writes for producer in producers) == 1, "one exchange, one write"


def test_no_ring_while_awake() -> None:
    """A ring's producer spares the system call while the consumer is awake."""
    source, sink = (create_doorbell(name, transport="ring") for name in ("source", "sink"))
    channel = create_channel("c", producer=source, consumer=sink, transport="ring")
    bell, producer, consumer = (
        Doorbell.attach(sink),
        Producer.attach(channel.producer_end),
        Consumer.attach(channel.consumer_end),
    )
    for expected in (0, 1, 1):
        producer.put_nowait(b"")
        producer.flush()
        assert producer.statistics().doorbell_writes == expected
        consumer.drain()
        bell.arm([consumer])
        if expected:
            bell.disarm()
    for thing in (bell, producer, consumer, channel, source, sink):
        thing.close()


def test_wait_reports_watched_descriptors(owned: tuple[Doorbell, object]) -> None:
    bell, _ = owned
    pipes = [os.pipe() for _ in range(40)]
    reads = [read for read, _ in pipes]
    os.write(pipes[3][1], b"x")
    os.close(pipes[39][1])
    assert bell.wait(None, reads) == (reads[3], reads[39])
    bell.ring()
    assert bell.wait(None, reads[:3]) == ()
    with pytest.raises(ValueError):
        bell.wait(0, [-1])
    for read, write in pipes:
        os.close(read)
        if read != reads[39]:
            os.close(write)
    with pytest.raises(OSError):
        bell.wait(0, [reads[0]])


def test_wait_lets_other_threads_run(owned: tuple[Doorbell, object]) -> None:
    bell, _ = owned
    thread = threading.Thread(target=bell.ring)
    thread.start()
    assert bell.wait() == ()
    thread.join()
    assert bell.statistics().wakes == 1


def test_close_while_a_thread_waits_is_refused(transport: Literal["ring", "socket"]) -> None:
    handle = create_doorbell("x", transport=transport)
    bell = Doorbell.attach(handle)
    read, write = os.pipe()
    entered = threading.Event()

    def wait() -> None:
        entered.set()
        bell.wait(None, [read])

    thread = threading.Thread(target=wait)
    thread.start()
    entered.wait()
    while bell.statistics().waits == 0:
        time.sleep(0)
    with pytest.raises(ShmError):
        bell.close()
    os.write(write, b"x")
    thread.join()
    bell.close()
    handle.close()
    os.close(read)
    os.close(write)


def test_signal_handlers_run_while_waiting(owned: tuple[Doorbell, object]) -> None:
    """A handler that rings wakes; one that raises propagates."""
    bell, _ = owned
    seen: list[int] = []

    def ring(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        bell.ring()

    def fail(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        bell.wait()
        assert seen == [signal.SIGALRM]
        signal.signal(signal.SIGALRM, fail)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            bell.wait()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_foreign_pages_are_refused(transport: Literal["ring", "socket"]) -> None:
    handle = create_doorbell("x", transport=transport)
    page, _ = handle.filenos()
    os.pwrite(page, b"\0" * 8, 0)
    with pytest.raises(AttachError):
        Doorbell.attach(handle)
    handle.close()
