"""A device that does everything as late as it may: when the host waits for it, and not before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from late_lane import LateLane

from ringserve.engine.gpu.device import Event, HostDevice
from ringserve.engine.transfer_lane import TransferLane


class LateDevice(HostDevice):
    """Keeps the promises of ``Device`` and nothing more. Work in the compute stream runs when an event that comes after
    it is waited for: what was overwritten on the host meanwhile is read as it is then, and results that nobody waited
    for are not there. Pinned memory begins with words that nobody wrote."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self.num_submitted = 0
        self.num_done = 0

    def submit(self, work: Callable[[], None]) -> None:
        self._waiting.append(work)
        self.num_submitted += 1

    def pinned(self, num_words: int) -> torch.Tensor:
        return torch.full((num_words,), 0x7FFF_FFFF, dtype=torch.int32)

    def event(self) -> Event:
        return _LateEvent(self)

    def synchronize(self) -> None:
        self.run_until(self.num_submitted)

    def transfer_lane(self) -> TransferLane:
        return LateLane()

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        self.synchronize()
        return super().capture(work)

    def run_until(self, number: int) -> None:
        """So much of what was submitted."""
        while self.num_done < number:
            self._waiting.popleft()()
            self.num_done += 1


class _LateEvent:
    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._number = 0

    def record(self) -> None:
        self._number = self._device.num_submitted

    def synchronize(self) -> None:
        self._device.run_until(self._number)

    def is_done(self) -> bool:
        return self._number <= self._device.num_done
