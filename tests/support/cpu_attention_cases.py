"""Pages filled token by token, and attention by its definition in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringserve.kernels.cpu.aligned import aligned_zeros
from ringserve.kernels.cpu.features import Level
from ringserve.kernels.cpu.kv_pages import write_key, write_value
from ringserve.kernels.cpu.linear_bf16 import to_bf16
from ringserve.kernels.cpu.paged_attention import LOG2_E, attend, scratch_bytes

Floats = NDArray[np.float32]


def rounded(x: Any) -> Floats:
    """To bfloat16 and back."""
    return (to_bf16(np.asarray(x, np.float32)).astype(np.uint32) << 16).view(np.float32)


@dataclass
class Sequence:
    """One kv head's keys and values of a sequence, in pages."""

    keys: Floats
    values: Floats
    page_size: int
    key_pages: NDArray[np.uint16]
    value_pages: NDArray[np.uint16]
    table: NDArray[np.int32]
    scratch: NDArray[np.uint8]

    @property
    def dim(self) -> int:
        return int(self.keys.shape[1])

    def attend(self, level: Level, queries: Floats, group: int, first: int, window: int) -> Floats:
        """Rows [tokens * group, dim] for the tokens from position ``first`` on."""
        bits = to_bf16(queries)
        address = attend(
            level,
            bits.ctypes.data,
            len(bits),
            group,
            first,
            window,
            np.float32(self.dim**-0.5 * LOG2_E),
            self.key_pages.ctypes.data,
            self.value_pages.ctypes.data,
            self.table.ctypes.data,
            2 * self.page_size * self.dim,
            self.page_size,
            self.dim,
            self.scratch.ctypes.data,
            0,
        )
        start = address - self.scratch.ctypes.data
        found: Floats = self.scratch[start : start + bits.size * 4].view(np.float32).reshape(bits.shape).copy()
        return found


def make_sequence(length: int, dim: int, page_size: int, seed: int = 0) -> Sequence:
    """Random keys and values in shuffled pages; everything that was not written is NaN."""
    rng = np.random.default_rng(seed)
    keys, values = (rng.standard_normal((length, dim), dtype=np.float32) for _ in range(2))
    count = -(-length // page_size)
    pages = [aligned_zeros(((count + 2) * page_size * dim,), np.uint16) for _ in range(2)]
    for page in pages:
        page[:] = 0x7FC0
    # One more entry: the kernel may look one page ahead.
    table = np.concatenate([rng.permutation(count + 1)[:count] + 1, [0]]).astype(np.int32)
    scratch = aligned_zeros((scratch_bytes(dim, page_size),), np.uint8)
    for t in range(length):
        at = int(table[t // page_size]) * 2 * page_size * dim
        write_key(keys[t].ctypes.data, dim, pages[0].ctypes.data + at, t % page_size, scratch.ctypes.data)
        write_value(values[t].ctypes.data, dim, pages[1].ctypes.data + at, t % page_size)
    return Sequence(keys, values, page_size, pages[0], pages[1], table, scratch)


def reference(sequence: Sequence, queries: Floats, group: int, first: int, window: int) -> NDArray[np.float64]:
    """Attention by its definition, on the rounded numbers."""
    keys, values = rounded(sequence.keys).astype(np.float64), rounded(sequence.values).astype(np.float64)
    rows = []
    for r, query in enumerate(rounded(queries).astype(np.float64)):
        stop = first + r // group + 1
        start = max(0, stop - window) if window else 0
        scores = keys[start:stop] @ query * sequence.dim**-0.5
        weights = np.exp(scores - scores.max())
        rows.append(weights / weights.sum() @ values[start:stop])
    return np.array(rows)
