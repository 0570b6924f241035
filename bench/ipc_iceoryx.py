"""iceoryx2's publish/subscribe with an event beside it, through its plain Python API; only where it is installed."""

from __future__ import annotations

import ctypes
import importlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

LARGEST = 1 << 20


@dataclass(frozen=True)
class IceoryxSpec:
    """Names of the two services, seen from one end."""

    incoming: str
    outgoing: str

    def open(self) -> IceoryxEnd:
        return IceoryxEnd(self)


class IceoryxEnd:
    def __init__(self, spec: IceoryxSpec) -> None:
        iox2 = importlib.import_module("iceoryx2")
        iox2.set_log_level(iox2.LogLevel.Fatal)
        self._slice = iox2.Slice[ctypes.c_uint8]
        self._node = iox2.NodeBuilder.new().create(iox2.ServiceType.Ipc)
        name = iox2.ServiceName.new
        incoming, outgoing = (self._messages(name(which)) for which in (spec.incoming, spec.outgoing))
        self._subscriber = incoming.subscriber_builder().create()
        self._publisher = (
            outgoing.publisher_builder()
            .initial_max_slice_len(LARGEST)
            .backpressure_strategy(iox2.BackpressureStrategy.RetryUntilDelivered)
            .create()
        )
        events = [
            self._node.service_builder(name(f"{which}-event")).event().open_or_create()
            for which in (spec.incoming, spec.outgoing)
        ]
        self._listener = events[0].listener_builder().create()
        self._notifier = events[1].notifier_builder().create()
        self._wait_for(incoming, outgoing, events)

    def _messages(self, name: Any) -> Any:
        return (
            self._node.service_builder(name)
            .publish_subscribe(self._slice)
            .subscriber_max_buffer_size(256)
            .enable_safe_overflow(False)
            .open_or_create()
        )

    def _wait_for(self, incoming: Any, outgoing: Any, events: list[Any]) -> None:
        """What is published before the other end has subscribed is lost."""
        deadline = time.monotonic() + 20.0
        while not (
            outgoing.dynamic_config.number_of_subscribers
            and incoming.dynamic_config.number_of_publishers
            and all(event.dynamic_config.number_of_listeners for event in events)
        ):
            if time.monotonic() > deadline:
                raise TimeoutError("the other end did not subscribe")
            time.sleep(0.001)

    def send(self, messages: Sequence[bytes]) -> None:
        for data in messages:
            sample = self._publisher.loan_slice_uninit(len(data))
            ctypes.memmove(sample.payload_ptr, data, len(data))
            sample.assume_init().send()
        self._notifier.notify()

    def receive(self) -> list[bytes]:
        while not (messages := self._take()):
            self._listener.blocking_wait()
        return messages

    def _take(self) -> list[bytes]:
        messages: list[bytes] = []
        while len(messages) < 64 and (sample := self._subscriber.receive()) is not None:
            messages.append(bytes(sample.payload().as_memory_view()))
            sample.delete()
        return messages

    def doorbells(self) -> int:
        return 0

    def close(self) -> None:
        for port in (self._notifier, self._listener, self._publisher, self._subscriber):
            port.delete()


def specs() -> tuple[IceoryxSpec, IceoryxSpec]:
    """Near and far end of a new pair of services."""
    pair = secrets.token_hex(8)
    forth, back = f"ringserve-bench-{pair}-forth", f"ringserve-bench-{pair}-back"
    return IceoryxSpec(back, forth), IceoryxSpec(forth, back)
