"""A step's results, from the words that the device copied to the host to ``ModelRunnerOutput``'s columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ringserve.messages.columns import pack_i32
from ringserve.messages.logprobs import LogprobColumns, SlotPromptLogprobs


@dataclass(frozen=True)
class HostLogprobs:
    """``device_step.Logprobs`` on the host."""

    ids: NDArray[np.int32]
    """[rows, 1 + most]: the token itself, then the most likely ones."""
    values: NDArray[np.float32]
    ranks: NDArray[np.int32]

    @classmethod
    def read(cls, words: torch.Tensor, rows: int, width: int) -> HostLogprobs:
        """As ``Logprobs.copy_to`` wrote them."""
        array: NDArray[np.int32] = words.numpy()
        ids, values = array[rows : rows * (1 + width)], array[rows * (1 + width) : rows * (1 + 2 * width)]
        return cls(ids.reshape(rows, width), values.view(np.float32).reshape(rows, width), array[:rows])

    def columns(self, rows: Sequence[int], ks: Sequence[int]) -> LogprobColumns:
        """Of some rows, in this order, with the token itself and ``ks[i]`` likely ones; -1: none were asked for."""
        asked = [(row, 1 + k) for row, k in zip(rows, ks, strict=True) if k >= 0]
        return LogprobColumns(
            counts=pack_i32(1 + k for k in ks),
            token_ids=b"".join([self.ids[row, :count].tobytes() for row, count in asked]),
            values=b"".join([self.values[row, :count].tobytes() for row, count in asked]),
            ranks=b"".join([self.ranks[row : row + 1].tobytes() for row, _ in asked]),
        )


def logprob_words(rows: int, width: int) -> int:
    """How many words ``Logprobs`` of so many rows take."""
    return rows * (1 + 2 * width)


@dataclass(frozen=True)
class PromptPart:
    """Prompt tokens of one slot whose log probabilities a step finds."""

    slot: int
    start: int
    """The first position computed; the logits there are about the token after it."""
    first: int
    """Row of the first logits."""
    count: int
    """How many tokens they are about."""
    k: int

    def result(self, logprobs: HostLogprobs | None) -> SlotPromptLogprobs | None:
        """None where there is nothing to say. The first token of all has none."""
        columns = LogprobColumns(b"", b"", b"", b"")
        if self.count and logprobs is not None:
            columns = logprobs.columns(range(self.first, self.first + self.count), [self.k] * self.count)
        if self.start == 0:
            counts = pack_i32([0]) + columns.counts
            columns = LogprobColumns(counts, columns.token_ids, columns.values, columns.ranks)
        return SlotPromptLogprobs(self.slot, self.start + 1 if self.start else 0, columns) if columns.counts else None
