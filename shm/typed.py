"""Channels of typed messages: a Sender encodes, a Receiver decodes; one closed union of msgspec Structs each."""

from __future__ import annotations

from collections import deque
from typing import Any, Generic, TypeVar

import msgspec

from ringserve.shm.errors import ChannelOverflow, CorruptFrame, MessageTooLarge, ShmError
from ringserve.shm.roles import MAX_MESSAGE, Consumer, Producer

T = TypeVar("T")

MESSAGES_PER_FLUSH = 8
"""Of a turn that sends many, so many are published together: a neighbour on another core begins with the first while
the rest is being made, and a batch does not pass from process to process as one lump with one core idle. While the
neighbour is awake a flush is a store; only where it sleeps does the kernel come in."""


class Sender(Generic[T]):
    """Sends messages without ever waiting: what finds no room stays in a bounded queue here, in order, and goes out
    with later ``flush`` calls. The rings form cycles, so a process that waited for space could wait for itself."""

    def __init__(self, producer: Producer, *, max_pending_bytes: int = MAX_MESSAGE) -> None:
        self.producer = producer
        self.pending_bytes = 0
        """Encoded bytes that are not in the channel yet."""
        self._max_pending_bytes = max_pending_bytes
        self._encode = msgspec.msgpack.Encoder().encode
        self._try_put, self._flush = producer.try_put, producer.flush
        self._max_payload = producer.max_payload
        self._pending: deque[bytes] = deque()
        self._unpublished = 0  # put since the last flush
        self._offset = 0  # how far the first pending message is in the channel already

    def send(self, message: T) -> None:
        """Put, or queue; visible to the receiver after ``flush`` at the latest. Raises MessageTooLarge, ChannelOverflow
        (the message is not taken), ChannelClosed."""
        data = self._encode(message)
        size = len(data)
        if not self._pending and size <= self._max_payload and self._try_put(data):
            self._unpublished += 1
            if self._unpublished == MESSAGES_PER_FLUSH:
                self._unpublished = 0
                self._flush()
            return
        if size > MAX_MESSAGE:
            raise MessageTooLarge(f"{size} bytes are more than a message may have ({MAX_MESSAGE})")
        # One message longer than a frame is always taken: most of it may go straight into the channel.
        straight = size > self._max_payload and not self._pending
        if self.pending_bytes + size > self._max_pending_bytes and not straight:
            raise ChannelOverflow(
                f"{self.pending_bytes} bytes wait for a neighbour that does not read; {size} more are over the bound "
                f"of {self._max_pending_bytes}"
            )
        self._pending.append(data)
        self.pending_bytes += size
        if straight:
            self._push()

    def flush(self) -> bool:
        """Put what is pending as far as there is room, publish, and ring. True if nothing is left pending. When not,
        this process's doorbell will be rung once there is room: flush again."""
        if self._pending:
            self._push()
        self._unpublished = 0
        self._flush()
        return not self._pending

    def _push(self) -> None:
        pending = self._pending
        while pending:
            data = pending[0]
            before = self._offset
            if len(data) <= self._max_payload:
                if not self._try_put(data):
                    return
                self._offset = len(data)
            else:
                self._offset = self.producer.put_part(data, before)
            self.pending_bytes -= self._offset - before
            if self._offset < len(data):
                return
            pending.popleft()
            self._offset = 0


class Receiver(Generic[T]):
    """Receives messages of one union of types."""

    def __init__(self, consumer: Consumer, type: Any) -> None:
        self.consumer = consumer
        self._drain = consumer.drain
        self._decode = msgspec.msgpack.Decoder(type).decode
        self._failure: ShmError | None = None

    def receive(self) -> list[T]:
        """A bounded batch, perhaps empty. Bytes that are not a message of the union raise CorruptFrame with the
        decoder's words and path, after the messages before them were returned. Raises what ``Consumer.drain`` does."""
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        batch = self._drain()
        try:
            return list(map(self._decode, batch))
        except msgspec.DecodeError:
            return self._before_the_fault(batch)

    def _before_the_fault(self, batch: list[bytes]) -> list[T]:
        messages: list[T] = []
        try:
            for data in batch:
                messages.append(self._decode(data))
        except msgspec.DecodeError as error:
            self._failure = CorruptFrame(f"not a message of this channel: {error}")
            if not messages:
                raise self._failure from error
        return messages
