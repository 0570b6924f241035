"""Where keys and values lie in the KV pool's slab, and the host's memory for it: numbers and numpy, without torch.

Layer ``i`` has two arrays, keys ``[num_pages + 1, kv_heads, page_size, key_dim]`` and values
``[num_pages + 1, kv_heads, page_size, value_dim]``, one after the other in the slab::

    | keys of layer 0 | values of layer 0 | keys of layer 1 | values of layer 1 | ...

so that one (page, head) is a contiguous run of ``page_size * dim`` elements. In an 8-bit type, each layer has two more
arrays after these, the scales of its keys and of its values: float32 ``[num_pages + 1, kv_heads, page_size]``.

Page 0 is reserved (padding of captured graphs points at it) and never given out; usable ids are ``1 .. num_pages``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ringserve.kernels.cpu.aligned import LARGE_PAGE, aligned_zeros

KVDType = Literal["float32", "float16", "bfloat16", "int8", "float8"]
"""float8 is e4m3fn, kept as its bits (``kernels/gpu/kv_format.py``)."""

ALIGNMENT = 4096
"""Bytes. A memory page: more than any vector load, or Triton's 16-byte assumption, asks for."""

ITEM_SIZES: dict[KVDType, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "float8": 1}


@dataclass(frozen=True)
class LayerKV:
    """What one layer keeps for each token."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def elements_per_token(self) -> int:
        """Keys and values together."""
        return self.kv_heads * (self.key_dim + self.value_dim)


def has_scales(dtype: KVDType) -> bool:
    """Whether each token and head has a float32 scale beside its elements."""
    return dtype in ("int8", "float8")


def bytes_per_page(layers: Sequence[LayerKV], page_size: int, dtype: KVDType) -> int:
    """Bytes that a page of ``page_size`` tokens takes over all layers."""
    scales = sum(2 * layer.kv_heads for layer in layers) * 4 if has_scales(dtype) else 0
    return (sum(layer.elements_per_token for layer in layers) * ITEM_SIZES[dtype] + scales) * page_size


@dataclass(frozen=True)
class SlabArray:
    """One array in the slab."""

    shape: tuple[int, ...]
    offset: int
    """Bytes, a multiple of ``ALIGNMENT``."""
    size: int
    """Bytes."""
    is_scales: bool
    """float32, whatever the pool's type."""


@dataclass(frozen=True)
class SlabLayout:
    """All arrays of a slab, layer by layer."""

    arrays: tuple[SlabArray, ...]
    per_layer: int
    slab_bytes: int

    @classmethod
    def create(cls, layers: Sequence[LayerKV], num_pages: int, page_size: int, dtype: KVDType) -> SlabLayout:
        """Raises ValueError for sizes that make no sense."""
        if num_pages < 1:
            raise ValueError(f"a KV pool needs at least one page, not {num_pages}")
        if page_size < 1 or page_size & (page_size - 1):
            raise ValueError(f"the page size must be a power of two, not {page_size}")
        arrays: list[SlabArray] = []
        end = 0
        for layer in layers:
            shape = (num_pages + 1, layer.kv_heads, page_size)
            wanted: list[tuple[tuple[int, ...], int, bool]] = []
            wanted += [((*shape, dim), ITEM_SIZES[dtype], False) for dim in (layer.key_dim, layer.value_dim)]
            if has_scales(dtype):
                wanted += [(shape, 4, True)] * 2
            for array_shape, item_size, is_scales in wanted:
                size = prod(array_shape) * item_size
                arrays.append(SlabArray(array_shape, end, size, is_scales))
                end += -(-size // ALIGNMENT) * ALIGNMENT  # each array starts aligned, whatever the sizes before it
        return cls(tuple(arrays), 4 if has_scales(dtype) else 2, end)


def host_memory(num_bytes: int) -> NDArray[np.uint8]:
    """Aligned memory whose contents mean nothing; the kernel commits it page by page as it is first written. Raises
    MemoryError where the machine has not that much."""
    if num_bytes >= LARGE_PAGE:  # in large pages: attention walks through it page by page
        return aligned_zeros((num_bytes,), np.uint8)
    raw: NDArray[Any] = np.empty(num_bytes + ALIGNMENT, dtype=np.uint8)
    offset = -raw.ctypes.data % ALIGNMENT
    return raw[offset : offset + num_bytes]


class HostPages:
    """A KV pool for compiled code of the host, which knows addresses only: a slab without torch's view of it.

    Raises ValueError for sizes that make no sense, MemoryError where they do not fit.
    """

    def __init__(self, layers: Sequence[LayerKV], num_pages: int, page_size: int, dtype: KVDType) -> None:
        self._layout = SlabLayout.create(layers, num_pages, page_size, dtype)
        self._slab = host_memory(self._layout.slab_bytes)
        for array in self._layout.arrays:
            self._slab[array.offset : array.offset + array.size // (num_pages + 1)] = 0
        self.page_size = page_size
        """Tokens in a page."""

    def addresses(self, index: int) -> tuple[int, ...]:
        """Of the keys and values (and their scales) of a layer."""
        base, count = self._slab.ctypes.data, self._layout.per_layer
        return tuple(base + array.offset for array in self._layout.arrays[index * count : (index + 1) * count])
