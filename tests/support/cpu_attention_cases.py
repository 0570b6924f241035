"""Pages of bfloat16 or int8 filled token by token, and attention by its definition in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ringserve.kernels.cpu.aligned import aligned_zeros
from ringserve.kernels.cpu.attention_inputs import Int8Pages, Pages, QueryRows
from ringserve.kernels.cpu.attention_spans import SPAN, first_page, merge_states, normalise, state_bytes
from ringserve.kernels.cpu.features import Level
from ringserve.kernels.cpu.kv_pages import write_key, write_value
from ringserve.kernels.cpu.kv_pages_int8 import write_key_int8, write_value_int8
from ringserve.kernels.cpu.linear_bf16 import to_bf16
from ringserve.kernels.cpu.paged_attention import LOG2_E, attend, attend_span, scratch_bytes
from ringserve.kernels.cpu.paged_attention_int8 import (
    attend_int8,
    attend_span_int8,
    scratch_bytes_int8,
    split_queries,
)
from ringserve.kernels.kv_codes import quantize_kv

Floats = NDArray[np.float32]


def rounded(x: Any) -> Floats:
    """To bfloat16 and back."""
    return (to_bf16(np.asarray(x, np.float32)).astype(np.uint32) << 16).view(np.float32)


def through_int8(x: Floats) -> NDArray[np.float64]:
    """To codes and back."""
    codes, scales = quantize_kv(torch.from_numpy(x))
    values: NDArray[np.float64] = (codes.double() * scales.double()[:, None]).numpy()
    return values


@dataclass
class Sequence:
    """One kv head's keys and values of a sequence, in pages."""

    keys: Floats
    values: Floats
    page_size: int
    key_pages: NDArray[Any]
    value_pages: NDArray[Any]
    scales: tuple[Floats, Floats] | None
    """Of keys and values in int8."""
    table: NDArray[np.int32]
    scratch: NDArray[np.uint8]

    @property
    def dim(self) -> int:
        return int(self.keys.shape[1])

    def attend(self, level: Level, queries: Floats, group: int, first: int, window: int) -> Floats:
        """Rows [tokens * group, dim] for the tokens from position ``first`` on."""
        bits, scratch = to_bf16(queries), self.scratch.ctypes.data
        rows, pages = self._rows(bits, group, first, window), self._pages()
        if isinstance(pages, Int8Pages):
            start = attend_int8(level, rows, pages, scratch, 0) - scratch
        else:
            start = attend(level, rows, pages, scratch, 0) - scratch
        found: Floats = self.scratch[start : start + 2 * bits.nbytes].view(np.float32).reshape(bits.shape).copy()
        return found

    def attend_in_spans(self, level: Level, queries: Floats, position: int, window: int) -> Floats:
        """The rows of one token: each span's state computed apart, the last first, then merged."""
        bits, dim, page_size, rows = to_bf16(queries), self.dim, self.page_size, len(queries)
        first = first_page(position, window, page_size) * page_size // SPAN
        size = state_bytes(rows, dim)
        states = aligned_zeros(((position // SPAN + 1) * size,), np.uint8)
        states[:] = 0xFF
        scratch, pages = self.scratch.ctypes.data, self._pages()
        query_rows = self._rows(bits, rows, position, window)
        for span in reversed(range(first, position // SPAN + 1)):
            self.scratch[:] = 0xFF
            rest = span, states.ctypes.data + span * size, position, 0
            if isinstance(pages, Int8Pages):
                split_queries(query_rows, pages, scratch)
                attend_span_int8(level, query_rows, pages, scratch, *rest)
            else:
                attend_span(level, query_rows, pages, scratch, *rest)
        whole = states.ctypes.data + first * size
        for span in range(first + 1, position // SPAN + 1):
            merge_states(level, rows, dim, whole, states.ctypes.data + span * size)
        normalise(rows, dim, whole)
        found: Floats = states[first * size :][: 4 * rows * dim].view(np.float32).reshape(rows, dim).copy()
        return found

    def _rows(self, bits: NDArray[np.uint16], group: int, position: int, window: int) -> QueryRows:
        scale = np.float32(self.dim**-0.5 * LOG2_E)
        return QueryRows(bits.ctypes.data, len(bits), group, position, window, scale)

    def _pages(self) -> Pages | Int8Pages:
        keys, values, table = (array.ctypes.data for array in (self.key_pages, self.value_pages, self.table))
        if self.scales is None:
            return Pages(keys, values, table, 1, self.page_size, self.dim)
        scales = self.scales[0].ctypes.data, self.scales[1].ctypes.data
        return Int8Pages(keys, values, *scales, table, 1, self.page_size, self.dim)


def make_sequence(length: int, dim: int, page_size: int, seed: int = 0, int8: bool = False) -> Sequence:
    """Random keys and values in shuffled pages; what was not written is NaN, or any code with a scale of NaN."""
    rng = np.random.default_rng(seed)
    keys, values = (rng.standard_normal((length, dim), dtype=np.float32) for _ in range(2))
    count = -(-length // page_size)
    elements = (count + 2) * page_size * dim
    if int8:
        pages: list[NDArray[Any]] = [aligned_zeros((elements,), np.uint8) for _ in range(2)]
        scales = (aligned_zeros((elements // dim,), np.float32), aligned_zeros((elements // dim,), np.float32))
        for page, some in zip(pages, scales, strict=True):
            page[:] = rng.integers(0, 256, elements)
            some[:] = np.nan
    else:
        pages = [aligned_zeros((elements,), np.uint16) for _ in range(2)]
        for page in pages:
            page[:] = 0x7FC0
    # One more entry: the kernel may look one page ahead.
    table = np.concatenate([rng.permutation(count + 1)[:count] + 1, [0]]).astype(np.int32)
    scratch = aligned_zeros((max(scratch_bytes(dim, page_size), scratch_bytes_int8(dim, page_size)),), np.uint8)
    at = scratch.ctypes.data
    for t in range(length):
        first, slot = int(table[t // page_size]) * page_size, t % page_size
        if int8:
            places = [array.ctypes.data + first * dim for array in pages]
            scale_places = [array.ctypes.data + 4 * first for array in scales]
            write_key_int8(keys[t].ctypes.data, dim, places[0], scale_places[0], slot, at)
            write_value_int8(values[t].ctypes.data, dim, places[1], scale_places[1], slot, at)
        else:
            places = [array.ctypes.data + 2 * first * dim for array in pages]
            write_key(keys[t].ctypes.data, dim, places[0], slot, at)
            write_value(values[t].ctypes.data, dim, places[1], slot)
    return Sequence(keys, values, page_size, pages[0], pages[1], scales if int8 else None, table, scratch)


def reference(sequence: Sequence, queries: Floats, group: int, first: int, window: int) -> NDArray[np.float64]:
    """Attention by its definition, on the rounded numbers."""
    stored = rounded if sequence.scales is None else through_int8
    keys, values = (stored(x).astype(np.float64) for x in (sequence.keys, sequence.values))
    rows = []
    for r, query in enumerate(rounded(queries).astype(np.float64)):
        stop = first + r // group + 1
        start = max(0, stop - window) if window else 0
        scores = keys[start:stop] @ query * sequence.dim**-0.5
        weights = np.exp(scores - scores.max())
        rows.append(weights / weights.sum() @ values[start:stop])
    return np.array(rows)
