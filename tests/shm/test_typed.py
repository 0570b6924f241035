"""Senders and receivers of msgspec unions."""

from __future__ import annotations

import msgspec
import pytest
from shm_workshop import Link, Workshop

from ringserve.shm import ChannelClosed, ChannelOverflow, CorruptFrame, MessageTooLarge, Receiver, Sender
from ringserve.shm.typed import MESSAGES_PER_FLUSH


class Number(msgspec.Struct, tag=True, array_like=True, frozen=True):
    value: int


class Blob(msgspec.Struct, tag=True, array_like=True, frozen=True):
    data: bytes


Message = Number | Blob


def make(link: Link, max_pending_bytes: int = 1 << 26) -> tuple[Sender[Message], Receiver[Message]]:
    return Sender(link.producer, max_pending_bytes=max_pending_bytes), Receiver(link.consumer, Message)


def test_messages_of_the_union_arrive_typed_and_in_order(workshop: Workshop) -> None:
    sender, receiver = make(workshop.link())
    sent: list[Message] = [Number(1), Blob(b"x"), Number(-5), Blob(b"")]
    for message in sent:
        sender.send(message)
    assert sender.flush()
    assert receiver.receive() == sent
    assert receiver.receive() == []


def test_a_long_turn_is_published_in_groups(workshop: Workshop) -> None:
    """The receiver need not wait for the last message of a turn to begin with the first."""
    sender, receiver = make(workshop.link())
    for number in range(2 * MESSAGES_PER_FLUSH + 1):
        sender.send(Number(number))
    assert receiver.receive() == [Number(number) for number in range(2 * MESSAGES_PER_FLUSH)]
    sender.flush()
    assert receiver.receive() == [Number(2 * MESSAGES_PER_FLUSH)]
    for _ in range(MESSAGES_PER_FLUSH - 1):
        sender.send(Number(0))
    assert receiver.receive() == [], "a flush begins a new group"


def test_what_finds_no_room_waits_in_order(workshop: Workshop) -> None:
    """More than the channel holds, small and fragmented mixed: nothing blocks, nothing overtakes."""
    link = workshop.link(1 << 16)
    sender, receiver = make(link)
    sent: list[Message] = []
    for number in range(300):
        sent.append(Number(number) if number % 3 else Blob(bytes([number % 256]) * (number * 200)))
        sender.send(sent[-1])
    assert not sender.flush()
    pending = sender.pending_bytes
    assert 0 < pending < 300 * 300 * 200
    got: list[Message] = []
    asleep = 0
    while len(got) < len(sent):
        got += receiver.receive()
        if link.source.arm([], [link.producer]) and not link.source.wait(0):
            asleep += 1
        sender.flush()
    assert got == sent
    assert sender.flush()
    assert sender.pending_bytes == 0


def test_queue_is_bounded(workshop: Workshop) -> None:
    link = workshop.link(1 << 16)
    sender, receiver = make(link, max_pending_bytes=10_000)
    accepted: list[Message] = []
    while sender.pending_bytes < 9_000:
        accepted.append(Blob(bytes([len(accepted) % 256]) * 1000))
        sender.send(accepted[-1])
    with pytest.raises(ChannelOverflow):
        sender.send(Blob(bytes(1000)))
    assert 9_000 <= sender.pending_bytes <= 10_000
    got: list[Message] = []
    while len(got) < len(accepted):
        sender.flush()
        got += receiver.receive()
    assert got == accepted
    sender.send(Number(1))
    assert sender.flush()
    assert receiver.receive() == [Number(1)]


def test_one_large_message_is_taken_beyond_the_bound(workshop: Workshop) -> None:
    link = workshop.link(1 << 16)
    sender, receiver = make(link, max_pending_bytes=1000)
    sender.send(Blob(bytes(1 << 20)))
    with pytest.raises(ChannelOverflow):
        sender.send(Number(1))
    got: list[Message] = []
    while not sender.flush() or not got:
        got += receiver.receive()
    assert got == [Blob(bytes(1 << 20))]


def test_total_length_is_bounded(workshop: Workshop) -> None:
    sender, _ = make(workshop.link())
    with pytest.raises(MessageTooLarge):
        sender.send(Blob(bytes(64 * 1024 * 1024)))
    assert sender.pending_bytes == 0


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", msgspec.msgpack.encode(["Other", 1]), msgspec.msgpack.encode(["Number", "one"])]
)
def test_bytes_outside_the_union_are_an_error_with_a_path(workshop: Workshop, data: bytes) -> None:
    link = workshop.link()
    sender, receiver = make(link)
    sender.send(Number(1))
    link.producer.put_nowait(data)
    sender.send(Number(2))
    sender.flush()
    assert receiver.receive() == [Number(1)]
    for _ in range(2):
        with pytest.raises(CorruptFrame) as caught:
            receiver.receive()
    if b"one" in data:
        assert "int" in str(caught.value)
        assert "$[1]" in str(caught.value)


def test_close_reaches_sender_and_receiver(workshop: Workshop) -> None:
    link = workshop.link()
    sender, receiver = make(link)
    sender.send(Number(1))
    sender.flush()
    link.producer.close()
    assert receiver.receive() == [Number(1)]
    with pytest.raises(ChannelClosed):
        receiver.receive()
    with pytest.raises(ChannelClosed):
        sender.send(Number(2))
