"""The KV pool's memory: one slab, cut into pages.

``kv_layout`` says where what lies. Which page belongs to whom is the scheduler's business: this module knows no
sequence.

The memory is not initialised: whatever reads a page must look only at positions that were written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ringserve.engine.array_namespace import ArrayNamespace, NumpyNamespace, torch_dtype
from ringserve.engine.kv_layout import KVDType, SlabLayout
from ringserve.engine.kv_layout import LayerKV as LayerKV
from ringserve.engine.kv_layout import bytes_per_page as bytes_per_page
from ringserve.kernels.page_copy import PageLayout


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
        namespace = namespace if namespace is not None else NumpyNamespace()
        layout = SlabLayout.create(layers, num_pages, page_size, dtype)
        # Kept: it owns the memory. int64 has no other meaning here than eight bytes, which both libraries know.
        self.array: Any = namespace.allocate(layout.slab_bytes // 8, np.dtype(np.int64))
        slab = namespace.to_torch(self.array, torch.int64)
        in_bytes = slab.view(torch.uint8)
        elements = [torch.float32 if array.is_scales else torch_dtype(dtype) for array in layout.arrays]
        views = [
            in_bytes[array.offset : array.offset + array.size].view(element).view(array.shape)
            for array, element in zip(layout.arrays, elements, strict=True)
        ]
        for pages_of_layer in views:
            pages_of_layer[0].zero_()
        per_layer = layout.per_layer
        by_layer = [views[i : i + per_layer] for i in range(0, len(views), per_layer)]
        self._layers = [(parts[0], parts[1]) for parts in by_layer]
        self._scales = [(parts[2], parts[3]) if per_layer == 4 else None for parts in by_layer]
        page_sizes = [array.size // (num_pages + 1) for array in layout.arrays]
        word = 8 if all(size % 8 == 0 for size in page_sizes) else 1
        self._slab = slab if word == 8 else in_bytes
        self._layout = PageLayout.create(
            [array.offset // word for array in layout.arrays], [size // word for size in page_sizes], namespace.device
        )
        self._statistics = KVPoolStatistics(
            num_layers=len(layers),
            num_pages=num_pages,
            page_size=page_size,
            bytes_per_page=bytes_per_page(layers, page_size, dtype),
            slab_bytes=layout.slab_bytes,
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

    def addresses(self, index: int) -> tuple[int, ...]:
        """Where a layer's keys and values (and their scales) begin, for compiled code of the same device."""
        return tuple(tensor.data_ptr() for tensor in (*self._layers[index], *(self._scales[index] or ())))

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
