"""Everything that the device keeps of the slots, as one array of words, and where each column lies in it.

::

    words | temperatures | top_ks | ... | block_tables | logprob_ks | row_slots | row_lengths | token_counts |

Each column ``[slots or rows, ...]`` begins at a multiple of ALIGNMENT words and is a view of its own type. Whatever the
host changes, of whichever column, is a list of (address, word): one copy and one launch (``kernels.gpu.write_words``)
bring a step's changes over, a sequence's parameters as well as a new page of its block table.

Widths (``StateWidths``) grow where a request needs more; that moves every column.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ringserve.kernels.gpu.sampler_state import SamplerState

ALIGNMENT = 64
"""Words: more than any load is wide."""

WIDTH_STEP = 16
"""Widths are multiples of this, so that kernels compiled for one width serve all."""


@dataclass(frozen=True)
class StateWidths:
    """Entries of the columns whose size requests choose."""

    ends: int = 64
    """End-of-sequence and stop tokens, where there are min_tokens."""
    biases: int = 256
    logprobs: int = 31
    """Most likely tokens whose log probabilities are reported, beside the token's own."""

    def grown(self, ends: int, biases: int, logprobs: int) -> StateWidths:
        """At least so wide; self where nothing is missing."""
        wider = StateWidths(
            _grown(self.ends, ends), _grown(self.biases, biases), _grown(self.logprobs + 1, logprobs + 1) - 1
        )
        return self if wider == self else wider


def rounded_width(needed: int) -> int:
    """A number of likely tokens, at least so many, whose rows are a multiple of WIDTH_STEP wide."""
    return -(-(needed + 1) // WIDTH_STEP) * WIDTH_STEP - 1


def _grown(width: int, needed: int) -> int:
    return width if needed <= width else -(-max(needed, 2 * width) // WIDTH_STEP) * WIDTH_STEP


@dataclass(frozen=True)
class _Column:
    offset: int
    """In words."""
    words_each: int
    """Of one element."""
    row_words: int
    dtype: np.dtype[Any]


_NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}


class DeviceState:
    """The columns. Raises ValueError where an address would not fit into a word."""

    def __init__(
        self, num_slots: int, num_rows: int, max_pages: int, vocab_size: int, widths: StateWidths, device: torch.device
    ) -> None:
        self.widths = widths
        host = torch.device("cpu")
        initial = SamplerState.allocate(
            num_slots, 1, host, count_rows=1, most_ends=widths.ends, most_biases=widths.biases
        )
        columns = {field.name: getattr(initial, field.name) for field in fields(initial)}
        columns["block_tables"] = torch.zeros(num_slots, max_pages, dtype=torch.int32)
        columns["logprob_ks"] = torch.full((num_slots,), -1, dtype=torch.int32)
        columns["row_slots"] = torch.full((num_rows,), -1, dtype=torch.int32)
        columns["row_lengths"] = torch.zeros(num_rows, dtype=torch.int32)
        del columns["token_counts"]
        self._columns: dict[str, _Column] = {}
        offset = 0
        for name, column in columns.items():
            each = column.element_size() // 4
            row_words = column[0].numel() * each
            self._columns[name] = _Column(offset, each, row_words, _NUMPY[column.dtype])
            offset += -(-column.numel() * each // ALIGNMENT) * ALIGNMENT
        self._columns["token_counts"] = _Column(offset, 1, vocab_size, np.dtype(np.int32))
        num_words = offset + num_slots * vocab_size
        if num_words >= 1 << 31:
            raise ValueError(f"the state of {num_slots} slots with a vocabulary of {vocab_size} tokens is too large")
        self.words = torch.zeros(num_words, dtype=torch.int32, device=device)
        views = {}
        for name, column in columns.items():
            views[name] = self._view(name, column.dtype, tuple(column.shape))
            views[name].copy_(column)
        views["token_counts"] = self._view("token_counts", torch.int32, (num_slots, vocab_size))
        self.sampler = SamplerState(**{field.name: views[field.name] for field in fields(SamplerState)})
        self.block_tables = views["block_tables"]
        self.logprob_ks = views["logprob_ks"]
        self.row_slots = views["row_slots"]
        self.row_lengths = views["row_lengths"]
        self._views = views

    def copy_from(self, narrower: DeviceState) -> None:
        """Everything that another state, at most as wide, knows."""
        for name, view in self._views.items():
            old = narrower._views[name]
            view[tuple(slice(0, size) for size in old.shape)].copy_(old)

    def writes(self, name: str, row: int, values: Any, first: int = 0) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """(addresses, words) that set elements ``first ...`` of a column's row to ``values`` (a number or several)."""
        column = self._columns[name]
        words = np.atleast_1d(np.asarray(values, dtype=column.dtype)).view(np.int32)
        start = column.offset + row * column.row_words + first * column.words_each
        return np.arange(start, start + len(words), dtype=np.int32), words

    def addresses(self, name: str, rows: NDArray[np.int64], elements: NDArray[np.int64] | int = 0) -> NDArray[np.int32]:
        """Of one-word elements ``[rows[i], elements[i]]``."""
        column = self._columns[name]
        found: NDArray[np.int32] = (column.offset + rows * column.row_words + elements).astype(np.int32)
        return found

    def _view(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        column = self._columns[name]
        words = self.words[column.offset : column.offset + prod(shape) * column.words_each]
        return words.view(dtype).view(shape)
