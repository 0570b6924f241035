"""The KV pool's memory: one slab, cut into pages.

Layer ``i`` has two arrays, keys ``[num_pages + 1, kv_heads, page_size, key_dim]`` and values
``[num_pages + 1, kv_heads, page_size, value_dim]``, one after the other in the slab::

    | keys of layer 0 | values of layer 0 | keys of layer 1 | values of layer 1 | ...

so that one (page, head) is a contiguous run of ``page_size * dim`` elements. In an 8-bit type, each layer has two more
arrays after these, the scales of its keys and of its values: float32 ``[num_pages + 1, kv_heads, page_size]``.

Page 0 is reserved (padding of captured graphs points at it) and never given out; usable ids are ``1 .. num_pages``.
Which page belongs to whom is the scheduler's business: this module knows no sequence.

The memory is not initialised: whatever reads a page must look only at positions that were written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from ringserve.engine.array_namespace import (
    ALIGNMENT,
    ArrayNamespace,
    KVDType,
    NumpyNamespace,
    has_scales,
    storage_dtype,
    torch_dtype,
)
from ringserve.kernels.page_copy import PageLayout


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


@dataclass(frozen=True)
class KVPoolStatistics:
    """Sizes, for logs and metrics."""

    num_layers: int
    num_pages: int
    """Usable ones."""
    page_size: int
    """Tokens."""
    bytes_per_page: int
    """Over all layers."""
    slab_bytes: int
    """Address space taken; a host commits it as it is first written."""
    dtype: KVDType

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit."""
        return self.num_pages * self.page_size


def bytes_per_page(layers: Sequence[LayerKV], page_size: int, dtype: KVDType) -> int:
    """Bytes that a page of ``page_size`` tokens takes over all layers."""
    scales = sum(2 * layer.kv_heads for layer in layers) * 4 if has_scales(dtype) else 0
    return (sum(layer.elements_per_token for layer in layers) * storage_dtype(dtype).itemsize + scales) * page_size


class KVPool:
    """Keys and values of all layers.

    Raises ValueError for sizes that make no sense, MemoryError where they do not fit.
    """

    def __init__(
        self,
        layers: Sequence[LayerKV],
        num_pages: int,
        page_size: int,
        dtype: KVDType,
        namespace: ArrayNamespace | None = None,
    ) -> None:
        if num_pages < 1:
            raise ValueError(f"a KV pool needs at least one page, not {num_pages}")
        if page_size < 1 or page_size & (page_size - 1):
            raise ValueError(f"the page size must be a power of two, not {page_size}")
        namespace = namespace if namespace is not None else NumpyNamespace()
        arrays: list[tuple[torch.dtype, tuple[int, ...]]] = []
        for layer in layers:
            shape = (num_pages + 1, layer.kv_heads, page_size)
            arrays += [(torch_dtype(dtype), (*shape, dim)) for dim in (layer.key_dim, layer.value_dim)]
            if has_scales(dtype):
                arrays += [(torch.float32, shape)] * 2
        sizes = [prod(shape) * element.itemsize for element, shape in arrays]
        offsets = [0]
        for size in sizes:
            # Each array starts aligned, whatever the sizes before it.
            offsets.append(offsets[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
        # Kept: it owns the memory. int64 has no other meaning here than eight bytes, which both libraries know.
        self.array: Any = namespace.allocate(offsets[-1] // 8, np.dtype(np.int64))
        slab = namespace.to_torch(self.array, torch.int64)
        in_bytes = slab.view(torch.uint8)
        views = [
            in_bytes[offset : offset + size].view(element).view(shape)
            for offset, size, (element, shape) in zip(offsets, sizes, arrays, strict=False)
        ]
        for pages_of_layer in views:
            pages_of_layer[0].zero_()
        per_layer = 4 if has_scales(dtype) else 2
        by_layer = [views[i : i + per_layer] for i in range(0, len(views), per_layer)]
        self._layers = [(parts[0], parts[1]) for parts in by_layer]
        self._scales = [(parts[2], parts[3]) if per_layer == 4 else None for parts in by_layer]
        page_sizes = [size // (num_pages + 1) for size in sizes]
        word = 8 if all(size % 8 == 0 for size in page_sizes) else 1
        self._slab = slab if word == 8 else in_bytes
        self._layout = PageLayout.create(
            [offset // word for offset in offsets[:-1]], [size // word for size in page_sizes], namespace.device
        )
        self._statistics = KVPoolStatistics(
            num_layers=len(layers),
            num_pages=num_pages,
            page_size=page_size,
            bytes_per_page=bytes_per_page(layers, page_size, dtype),
            slab_bytes=offsets[-1],
            dtype=dtype,
        )

    @staticmethod
    def bytes_per_page(layers: Sequence[LayerKV], page_size: int, dtype: KVDType) -> int:
        """See the function of the same name."""
        return bytes_per_page(layers, page_size, dtype)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Key pages and value pages of a layer; views of the slab."""
        return self._layers[index]

    def scales(self, index: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Scales of a layer's keys and values; None where its elements are stored as they are."""
        return self._scales[index]

    @property
    def slab(self) -> torch.Tensor:
        """The memory itself, in ``layout``'s words: for what moves whole pages."""
        return self._slab

    @property
    def layout(self) -> PageLayout:
        """Where the arrays lie in the slab."""
        return self._layout

    @property
    def num_pages(self) -> int:
        """Usable pages; their ids are ``1 .. num_pages``."""
        return self._statistics.num_pages

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self._statistics.page_size

    def statistics(self) -> KVPoolStatistics:
        """Sizes, for logs and metrics."""
        return self._statistics
