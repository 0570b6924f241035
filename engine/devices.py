"""The devices that a model can be computed on, and which of them a server takes.

Knows names and defaults only: what a device needs is imported by its own start-up module (``cpu_startup``,
``gpu/startup``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ringserve.engine.model_error import ModelError

logger = logging.getLogger("ringserve.executor")


@dataclass(frozen=True)
class Device:
    """What is the device's own choice where the user made none."""

    name: str
    page_size: int
    max_num_batched_tokens: int
    swap_space: int
    """Bytes of the host's memory for preempted sequences' pages."""


CPU = Device(name="cpu", page_size=64, max_num_batched_tokens=256, swap_space=0)

GPU = Device(name="cuda", page_size=16, max_num_batched_tokens=2048, swap_space=4 << 30)
"""2048 tokens fill a large GPU's matrix units (its products are bound by memory up to some hundreds of rows), and a
step of them takes some tens of milliseconds with an 8B model by the units' speed, which is what its decoding neighbours
wait. Chosen by that reckoning; not measured."""


def choose_device(asked: Literal["auto", "cpu", "cuda"], misfit: Callable[[], str | None]) -> Device:
    """``misfit`` says why no GPU can be used, or None; it is asked only where one is wanted. Raises ModelError where a
    GPU was asked for and none can be used."""
    if asked == "cpu":
        return CPU
    reason = misfit()
    if reason is None:
        return GPU
    if asked == "cuda":
        raise ModelError(f"--device cuda: {reason}")
    logger.info("computing on the CPU: %s", reason)
    return CPU
