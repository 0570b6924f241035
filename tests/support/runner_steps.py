"""Steps for a runner that no scheduler planned."""

from __future__ import annotations

from typing import Any

from device_runners import PAGE_SIZE

from ringserve.messages.columns import pack_i32
from ringserve.messages.sampling import SamplingParams
from ringserve.messages.steps import NewSequence, SchedulerOutput


def first_step(prompts: list[list[int]], **sampling: Any) -> SchedulerOutput:
    """All prompts whole, in slots 0 ..., each with pages for 16 tokens."""
    parameters = SamplingParams(**{"seed": 1, "temperature": 0.0, **sampling})
    pages = 16 // PAGE_SIZE
    return SchedulerOutput(
        step_id=0,
        new_sequences=tuple(
            NewSequence(slot, pack_i32(ids), len(ids), 0, 0, parameters, 12) for slot, ids in enumerate(prompts)
        ),
        slots=pack_i32(range(len(prompts))),
        num_tokens=pack_i32(len(ids) for ids in prompts),
        new_page_counts=pack_i32([pages] * len(prompts)),
        new_pages=pack_i32(range(1, 1 + pages * len(prompts))),
        freed_slots=b"",
    )


def decode_step(step_id: int, slots: list[int]) -> SchedulerOutput:
    ones = [1] * len(slots)
    return SchedulerOutput(step_id, (), pack_i32(slots), pack_i32(ones), pack_i32([0] * len(slots)), b"", b"")
