"""A step whose prompts ask for log probabilities, in parts: logits of thousands of tokens at once are gigabytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ringserve.engine.slot_table import SlotTable

_Rows = tuple[NDArray[np.int32], NDArray[np.int32]]


def split_step(table: SlotTable, slots: NDArray[np.int32], counts: NDArray[np.int32], most: int) -> list[_Rows]:
    """Rows (slots, counts) of steps that are the same when computed one after the other, each with at most ``most``
    tokens of prompts that ask, but that every such row has at least one in the last. All but the last are the beginning
    of one row's chunk."""
    asks = table.wants_prompt[slots] & (table.computed[slots] < table.num_prompt[slots])
    left = counts.copy()
    parts: list[_Rows] = []
    while True:
        excess = int(left[asks].sum()) - most
        row = int(np.argmax(np.where(asks, left, 0))) if len(left) else 0
        if excess <= 0 or left[row] == 1:
            return [*parts, (slots, left)]
        taken = min(most, excess, int(left[row]) - 1)
        left[row] -= taken
        parts.append((slots[row : row + 1], np.array([taken], dtype=np.int32)))
