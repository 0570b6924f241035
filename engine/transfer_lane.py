"""Copies between a device and its host beside the computation: an ordered lane of transfers.

Compute and transfers are two orders of work. A transfer runs after all compute that was submitted before it and after
all earlier transfers; compute that needs a transfer's result, or its memory back, waits for its ticket. On CPUs
everything happens at once, which keeps both promises.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class TransferLane(Protocol):
    """One lane of transfers beside one stream of compute. Tickets are opaque."""

    def submit(self, transfer: Callable[[], None]) -> Any:
        """Run ``transfer`` (copies, nothing that waits) in the lane; the ticket stands for its end."""

    def wait(self, ticket: Any) -> None:
        """Compute submitted from now on runs after the ticket's transfer. The host goes on."""

    def is_done(self, ticket: Any) -> bool:
        """Whether the ticket's transfer has ended."""

    def drain(self) -> None:
        """The host waits until all transfers have ended: for measurements."""


def upload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A small tensor of the host on ``device``, without waiting: compute that is submitted later finds it there.

    Always from pinned memory: a copy out of pageable memory may wait for all that the device has still to do. torch
    gives the pinned memory to nobody before the copy is done.
    """
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


class ImmediateLane:
    """For CPUs: a transfer is over when it was submitted."""

    def submit(self, transfer: Callable[[], None]) -> None:
        transfer()

    def wait(self, ticket: None) -> None:
        pass

    def is_done(self, ticket: None) -> bool:
        return True

    def drain(self) -> None:
        pass


class CudaLane:
    """A CUDA stream of its own; compute is torch's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)

    def submit(self, transfer: Callable[[], None]) -> torch.cuda.Event:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            transfer()
            event = torch.cuda.Event()
            event.record(self._stream)
        return event

    def wait(self, ticket: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(ticket)

    def is_done(self, ticket: torch.cuda.Event) -> bool:
        return bool(ticket.query())

    def drain(self) -> None:
        self._stream.synchronize()
