"""The devices that a model can be computed on, and which of them a server takes.

Knows names and defaults only: what a device needs is imported by its own start-up module (``cpu_startup``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ringserve.engine.model_error import ModelError


@dataclass(frozen=True)
class Device:
    """What is the device's own choice where the user made none."""

    name: str
    page_size: int
    max_num_batched_tokens: int


CPU = Device(name="cpu", page_size=64, max_num_batched_tokens=256)


def choose_device(asked: Literal["auto", "cpu", "cuda"]) -> Device:
    """This version computes on CPUs."""
    if asked == "cuda":
        raise ModelError("device cuda is not supported by this version; leave --device out or set it to cpu")
    return CPU
