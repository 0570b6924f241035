"""What wakes a process whose channels are sockets: exactly the ends that it armed, and nothing for ever."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
from collections.abc import Callable, Iterator

import pytest
import uvloop
from shm_workshop import Link, Workshop

from ringserve.shm import ChannelClosed, Consumer, Doorbell, PeerDied, Producer, socket_end, socket_producer
from ringserve.shm.channel import SocketCarrier

NOTHING: list[Producer] = []


@pytest.fixture(scope="module", autouse=True)
def first_uvloop() -> None:
    """The first of a process leaves something behind."""
    uvloop.new_event_loop().close()


@pytest.fixture
def link(socket_workshop: Workshop) -> Link:
    return socket_workshop.link(1 << 16)


def rung(bell: Doorbell) -> bool:
    """Would a wait return by itself?"""
    wakes = bell.statistics().wakes
    bell.wait(0)
    return bell.statistics().wakes > wakes


def say(link: Link, data: bytes = b"x") -> None:
    link.producer.put_nowait(data)
    link.producer.flush()


def fill(link: Link) -> int:
    """Until there is no room; how many messages went in."""
    count = 0
    while link.producer.try_put(bytes(1000)):
        count += 1
    return count


def take_all(link: Link) -> int:
    count = 0
    while got := link.consumer.drain():
        count += len(got)
    return count


def test_a_message_wakes_until_it_is_taken(link: Link) -> None:
    assert link.sink.arm([link.consumer])
    assert not rung(link.sink)
    say(link)
    assert rung(link.sink)
    assert rung(link.sink), "level-triggered: it is still there"
    assert not link.sink.arm([link.consumer])
    assert link.consumer.drain() == [b"x"]
    assert link.sink.arm([link.consumer])
    assert not rung(link.sink)
    assert link.sink.statistics().spurious_wakes == 0


def test_what_came_after_the_last_look_wakes_at_once(link: Link) -> None:
    """Arming makes no system call where the last read had said that nothing is left."""
    say(link)
    assert link.consumer.drain() == [b"x"]
    say(link, b"y")
    assert link.sink.arm([link.consumer])
    assert rung(link.sink)
    assert link.consumer.drain() == [b"y"]


@pytest.mark.parametrize("kind", [list, tuple])
def test_only_the_armed_ends_wake(link: Link, kind: Callable[[list[Consumer]], list[Consumer]]) -> None:
    """A process that waits for space only is not kept awake by what it does not read."""
    assert link.sink.arm(kind([link.consumer]))
    say(link)
    assert link.sink.arm(kind([]), [link.producer])
    assert not rung(link.sink)
    assert link.sink.arm(kind([link.consumer]))
    assert rung(link.sink), "what came meanwhile was not forgotten"
    link.consumer.drain()
    assert link.sink.arm(kind([link.consumer]))
    say(link)
    assert rung(link.sink)


def test_a_list_that_changed_is_looked_at_again(socket_workshop: Workshop) -> None:
    first, second = socket_workshop.link(), socket_workshop.link()
    consumers = [first.consumer]
    assert first.sink.arm(consumers)
    consumers[0] = second.consumer
    assert first.sink.arm(consumers)
    say(first)
    assert not rung(first.sink)
    say(second)
    assert rung(first.sink)


def test_an_end_belongs_to_the_doorbell_that_armed_it_last(socket_workshop: Workshop) -> None:
    link, other = socket_workshop.link(), socket_workshop.link()
    for bell, idle in ((link.sink, other.sink), (other.sink, link.sink), (link.sink, other.sink)):
        assert bell.arm([link.consumer])
        say(link)
        assert rung(bell)
        assert not rung(idle)
        link.consumer.drain()


def test_a_producer_wakes_only_while_it_waits(link: Link) -> None:
    assert link.source.arm([], [link.producer])
    assert not rung(link.source), "there is room all the time, but nobody waits for it"
    sent = fill(link)
    assert link.source.arm([], [link.producer])
    assert not rung(link.source)
    assert take_all(link) == sent
    assert rung(link.source)
    assert not link.source.arm([], [link.producer]), "it waits, and there is room"
    assert link.producer.try_put(b"x")
    assert not rung(link.source), "not registered from the moment it has what it waited for"
    assert link.source.arm([], [link.producer])
    assert not rung(link.source)


def test_a_waiting_producer_whose_consumer_is_gone(link: Link) -> None:
    fill(link)
    assert link.source.arm([], [link.producer])
    link.consumer.close()
    assert rung(link.source)
    assert not link.source.arm([], [link.producer])
    for _ in range(2):
        with pytest.raises(ChannelClosed):
            link.producer.try_put(b"x")
        assert link.source.arm([], [link.producer])
        assert not rung(link.source), "the hang-up was reported, and keeps nobody awake"
    link.producer.flush()


def test_a_closed_consumer_is_told_of_at_the_second_put(link: Link) -> None:
    """Nothing is asked of the kernel before ``flush``, which does not raise."""
    link.consumer.close()
    link.producer.put_nowait(b"x")
    link.producer.flush()
    with pytest.raises(ChannelClosed):
        link.producer.put_nowait(b"y")


def test_an_end_that_was_reported_keeps_nobody_awake(link: Link) -> None:
    link.sink.arm([link.consumer])
    link.producer.close()
    assert rung(link.sink)
    with pytest.raises(ChannelClosed):
        link.consumer.drain()
    for _ in range(3):
        assert link.sink.arm([link.consumer])
        assert not rung(link.sink)
        link.sink.ring()
        assert rung(link.sink), "by hand"


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_closed_end_wakes_nobody_though_its_socket_lives_on(socket_workshop: Workshop, how: str) -> None:
    """The channel's handle has another descriptor of the same socket: closing the end's own does not end the epoll's
    interest in it."""
    source, sink = socket_workshop.doorbell("source"), socket_workshop.doorbell("sink")
    channel = socket_workshop.channel("c", source, sink)
    bell = socket_workshop.keep(Doorbell.attach(sink))
    producer = socket_workshop.keep(Producer.attach(channel.producer_end))
    consumer = Consumer.attach(channel.consumer_end)
    assert bell.arm([consumer])
    producer.put_nowait(b"x")
    producer.flush()
    assert rung(bell)
    if how == "close":
        consumer.close()
    else:
        assert bell.arm([])
        del consumer
        gc.collect()
    assert not rung(bell)
    # The same number again, for another socket.
    again = socket_workshop.channel("d", source, sink)
    following = socket_workshop.keep(Producer.attach(again.producer_end))
    consumer = socket_workshop.keep(Consumer.attach(again.consumer_end))
    assert bell.arm([consumer])
    assert not rung(bell)
    following.put_nowait(b"y")
    following.flush()
    assert rung(bell)


def test_a_closed_end_may_stay_in_the_set(link: Link) -> None:
    say(link)
    assert not link.sink.arm([link.consumer])
    link.consumer.close()
    link.producer.close()
    assert link.sink.arm([link.consumer], [link.producer])
    assert not rung(link.sink)


def test_ends_may_outlive_their_doorbell(socket_workshop: Workshop) -> None:
    link, other = socket_workshop.link(), socket_workshop.link()
    assert link.sink.arm([link.consumer])
    link.sink.close()
    say(link)
    assert other.sink.arm([link.consumer])
    assert rung(other.sink)
    link.consumer.close()
    assert not rung(other.sink)


def test_a_fork_that_closes_what_it_inherited_silences_nobody(link: Link) -> None:
    """The epoll is one for parent and child: what the child takes out of it, the parent loses."""
    sent = fill(link)
    assert link.source.arm([], [link.producer])
    assert not link.sink.arm([link.consumer])
    child = os.fork()
    if child == 0:
        for thing in (link.producer, link.consumer, link.source, link.sink):
            thing.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert rung(link.sink)
    assert take_all(link) == sent
    assert rung(link.source)


def test_numbers_of_watched_descriptors_may_be_used_again(link: Link) -> None:
    """A pidfd is closed when its process has been dealt with; the next one may get its number."""
    quiet, quiet_end = os.pipe()
    loud, loud_end = os.pipe()
    os.write(loud_end, b"x")
    for _ in range(2):
        assert link.sink.wait(0, [quiet]) == ()
    os.dup2(loud, quiet)
    assert link.sink.wait(0, [quiet]) == (quiet,)
    for fd in (quiet, quiet_end, loud, loud_end):
        os.close(fd)


def test_messages_and_watched_descriptors_wake_together(link: Link) -> None:
    read, write = os.pipe()
    assert link.sink.arm([link.consumer])
    assert link.sink.wait(0, [read]) == ()
    say(link)
    assert link.sink.wait(None, [read]) == ()
    os.write(write, b"x")
    link.sink.ring()
    assert link.sink.wait(None, [read]) == (read,)
    assert link.sink.statistics().wakes == 2
    assert link.consumer.drain() == [b"x"]
    assert link.sink.arm([link.consumer])
    assert link.sink.wait(None, [read]) == (read,)
    assert link.sink.statistics().wakes == 2, "a descriptor of the caller's is no ring"
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_an_event_loop_watches_all_ends_as_one_descriptor(
    link: Link, make_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    got: list[bytes] = []
    calls = 0

    def on_ring() -> None:
        nonlocal calls
        calls += 1
        link.sink.clear()
        got.extend(link.consumer.drain(2))
        if not link.sink.arm((link.consumer,)):
            asyncio.get_running_loop().call_soon(on_ring)

    async def some_turns() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def live() -> None:
        loop = asyncio.get_running_loop()
        assert link.sink.arm((link.consumer,))
        loop.add_reader(link.sink.fileno(), on_ring)
        await some_turns()
        assert calls == 0
        for number in range(5):
            say(link, b"%d" % number)
        await some_turns()
        assert got == [b"0", b"1", b"2", b"3", b"4"]
        after = calls
        await some_turns()
        assert calls == after, "nothing is there, and yet the loop is kept awake"
        link.sink.ring()
        await some_turns()
        assert calls == after + 1
        loop.remove_reader(link.sink.fileno())

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(live())


# ------------------------------------------------------------------------------------------------ what was flushed


@pytest.mark.parametrize("capacity", [1 << 16, 1 << 20])
@pytest.mark.parametrize("length", [0, 100, 5000, "longest"])
def test_what_was_put_is_sent_without_another_call(socket_workshop: Workshop, capacity: int, length: int | str) -> None:
    """Fullness is found out when it is too late to refuse: then the reserve takes what is held."""
    link = socket_workshop.link(capacity)
    data = bytes(link.producer.max_payload if isinstance(length, str) else length)
    sent = 0
    while link.producer.try_put(data):
        sent += 1
    link.producer.close()
    got = 0
    with contextlib.suppress(ChannelClosed):
        while True:
            got += len(link.consumer.drain())
    assert got == sent


def test_without_the_reserve_the_rest_is_held(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should the kernel give less than it did when the channel was made, nothing is lost either."""
    monkeypatch.setattr(socket_producer, "_RESERVED_SEND_BUFFER", 1)
    sent = 0
    while link.producer.try_put(b"%05d" % sent + bytes(5000)):
        sent += 1
    got: list[bytes] = []
    for _ in range(100):
        got += link.consumer.drain()
        if link.source.arm([], [link.producer]):
            assert len(got) == sent or not rung(link.source)
        link.producer.flush()
    assert [int(data[:5]) for data in got] == list(range(sent))
    assert link.producer.try_put(b"room again")
    link.producer.flush()
    assert link.consumer.drain() == [b"room again"]
    assert link.source.arm([], [link.producer])


def test_a_burst_is_one_system_call_on_either_side(link: Link) -> None:
    for _ in range(32):
        link.producer.put_nowait(bytes(64))
    assert link.consumer.drain() == [], "nothing before it is flushed"
    link.producer.flush()
    assert link.producer.statistics().doorbell_writes == 1
    assert len(link.consumer.drain()) == 32


# ------------------------------------------------------------------------------------------------ the end of a stream


@pytest.fixture
def raw(link: Link) -> Iterator[socket.socket]:
    """The producer's end as bytes."""
    carrier = link.channel.producer_end.carrier
    assert isinstance(carrier, SocketCarrier)
    with socket.socket(fileno=os.dup(carrier.end.fileno())) as end:
        yield end


@pytest.mark.parametrize("left", [1, 7, 8, 9, 11])
def test_a_frame_cut_short_by_a_death_is_not_delivered(link: Link, raw: socket.socket, left: int) -> None:
    say(link, b"whole")
    raw.send((socket_end.HEADER.pack(4, 1 << 16) + b"four")[:left])
    assert link.consumer.drain() == [b"whole"]
    assert link.consumer.drain() == []
    assert link.sink.arm([link.consumer])
    assert not rung(link.sink)
    raw.shutdown(socket.SHUT_RDWR)
    assert rung(link.sink)
    with pytest.raises(PeerDied):
        link.consumer.drain()


def test_frames_arrive_in_pieces(link: Link, raw: socket.socket) -> None:
    stream = b"".join(
        socket_end.HEADER.pack(length, number << 16) + bytes([number]) * length
        for number, length in enumerate((0, 1, 5, 300, 0, 8))
    )
    got: list[bytes] = []
    for byte in stream:
        raw.send(bytes([byte]))
        got += link.consumer.drain()
    assert got == [bytes([number]) * length for number, length in enumerate((0, 1, 5, 300, 0, 8))]
    assert link.consumer.statistics().bytes == 314
