"""Ends handed to real child processes."""

from __future__ import annotations

import os
import random
import signal

import pytest
from shm_workshop import Workshop

from ringserve.shm import ChannelClosed, Consumer, Doorbell, PeerDied, Phase, Producer, open_pidfd

PATIENCE = 60.0


def test_child_echoes_everything_with_both_rings_full(workshop: Workshop) -> None:
    """Both processes fill their rings towards the other; sleeping on both sides; all comes back in order."""
    mine, theirs = workshop.doorbell("parent"), workshop.doorbell("child")
    forth = workshop.channel("forth", mine, theirs, 1 << 16)
    back = workshop.channel("back", theirs, mine, 1 << 16)
    child = workshop.spawn("echo", theirs, forth.consumer_end, back.producer_end)
    bell = workshop.keep(Doorbell.attach(mine))
    producer = workshop.keep(Producer.attach(forth.producer_end))
    consumer = workshop.keep(Consumer.attach(back.consumer_end))
    forth.close()
    back.close()
    while not (hello := consumer.drain()):
        if bell.arm([consumer]):
            bell.wait(PATIENCE)
    assert hello.pop(0) == b"[]", "descriptors that the child's own children would inherit"
    assert theirs.pid == child.pid
    assert theirs.phase == Phase.ready.value
    assert theirs.heartbeat_ns > 0
    rng = random.Random(3)
    messages = [rng.randbytes(rng.randrange(2000)) for _ in range(4000)]
    sent, got = 0, hello
    while len(got) < len(messages):
        while sent < len(messages) and producer.try_put(messages[sent]):
            sent += 1
        producer.flush()
        if rng.random() < 0.1 or sent == len(messages):
            got += consumer.drain()
        if len(got) < len(messages) and bell.arm([consumer], [producer]):
            waited = bell.statistics().wakes
            bell.wait(PATIENCE)
            assert bell.statistics().wakes > waited, "nobody rang"
        got += consumer.drain()
    assert got == messages
    producer.close()
    workshop.finish(child)
    with pytest.raises(ChannelClosed):
        consumer.drain()
    assert theirs.phase == Phase.closed.value


def test_killed_peer_is_reported_after_its_last_message(workshop: Workshop) -> None:
    mine, theirs = workshop.doorbell("parent"), workshop.doorbell("child")
    channel = workshop.channel("c", theirs, mine)
    child = workshop.spawn("send_some_and_hang", theirs, channel.producer_end, 100)
    assert child.pid is not None
    bell = workshop.keep(Doorbell.attach(mine))
    consumer = workshop.keep(Consumer.attach(channel.consumer_end))
    channel.close()
    pidfd = open_pidfd(child.pid)
    assert not os.get_inheritable(pidfd)
    if bell.arm([consumer]):
        assert bell.wait(PATIENCE, [pidfd]) == ()
    os.kill(child.pid, signal.SIGKILL)
    while not bell.wait(PATIENCE, [pidfd]):
        pass  # rung by the messages
    consumer.mark_peer_dead(child.pid)
    got: list[bytes] = []
    while len(got) < 100:
        got += consumer.drain()
    assert not bell.arm([consumer])
    with pytest.raises(PeerDied) as caught:
        consumer.drain()
    assert caught.value.pid == child.pid
    assert got == [b"%d" % number for number in range(100)]
    assert bell.arm([consumer])
    os.close(pidfd)
    workshop.finish(child, -signal.SIGKILL)


def test_several_processes_wake_one(workshop: Workshop) -> None:
    sink = workshop.doorbell("sink")
    bell = workshop.keep(Doorbell.attach(sink))
    consumers: dict[bytes, Consumer] = {}
    children = []
    for name in (b"a", b"b", b"c"):
        source = workshop.doorbell(name.decode())
        channel = workshop.channel(name.decode(), source, sink, 1 << 16)
        children.append(workshop.spawn("produce", source, channel.producer_end, name, 20_000))
        consumers[name] = workshop.keep(Consumer.attach(channel.consumer_end))
        channel.close()
    counts = dict.fromkeys(consumers, 0)
    open_ends = dict(consumers)
    while open_ends:
        for name, consumer in tuple(open_ends.items()):
            try:
                messages = consumer.drain()
            except ChannelClosed:
                del open_ends[name]
                continue
            for message in messages:
                assert message == b"%s %d" % (name, counts[name])
                counts[name] += 1
        if open_ends and bell.arm(list(consumers.values())):
            waited = bell.statistics().wakes
            bell.wait(PATIENCE)
            assert bell.statistics().wakes > waited, "nobody rang"
    assert set(counts.values()) == {20_000}
    for child in children:
        workshop.finish(child)
