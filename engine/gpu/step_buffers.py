"""Memory of the host that a step's inputs leave from and its results arrive in.

The device copies both beside the host's work, so whoever has a pair must leave it alone until the step's event: a pair
is taken for a step as it is submitted, and given back when the step has been collected. With two steps in flight two
pairs are all there ever are.
"""

from __future__ import annotations

import torch

from ringserve.engine.gpu.device import Device


class StepBuffers:
    """One step's pair, and the event that its work ends with."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.event = device.event()
        self._inputs = device.pinned(1024)
        self._results = device.pinned(1024)

    def inputs(self, num_words: int) -> torch.Tensor:
        """int32 [num_words], to be filled."""
        if num_words > len(self._inputs):  # nothing is under way: the pair was free
            self._inputs = self._device.pinned(2 * num_words)
        return self._inputs[:num_words]

    def results(self, num_words: int) -> torch.Tensor:
        """int32 [num_words], to be copied into."""
        if num_words > len(self._results):
            self._results = self._device.pinned(2 * num_words)
        return self._results[:num_words]


class BufferPool:
    """Pairs that no step has."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: list[StepBuffers] = []

    def take(self) -> StepBuffers:
        """For one step."""
        return self._free.pop() if self._free else StepBuffers(self._device)

    def give_back(self, buffers: StepBuffers) -> None:
        """Its event is over, and its results were read."""
        self._free.append(buffers)
