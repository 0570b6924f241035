"""The KV pool's memory: one slab, cut into pages.

Layer ``i`` has two arrays, keys ``[num_pages + 1, kv_heads, page_size, key_dim]`` and values
``[num_pages + 1, kv_heads, page_size, value_dim]``, one after the other in the slab::

    | keys of layer 0 | values of layer 0 | keys of layer 1 | values of layer 1 | ...

so that one (page, head) is a contiguous run of ``page_size * dim`` elements. Page 0 is reserved (padding of captured
graphs points at it) and never given out; usable ids are ``1 .. num_pages``. Which page belongs to whom is the
scheduler's business: this module knows no sequence.

The memory is not initialised: whatever reads a page must look only at positions that were written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ringserve.engine.array_namespace import (
    ALIGNMENT,
    ArrayNamespace,
    KVDType,
    NumpyNamespace,
    storage_dtype,
    torch_dtype,
)


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
    return sum(layer.elements_per_token for layer in layers) * page_size * storage_dtype(dtype).itemsize


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
        item_size = storage_dtype(dtype).itemsize
        granule = ALIGNMENT // item_size
        shapes: list[tuple[int, int, int, int]] = []
        for layer in layers:
            for dim in (layer.key_dim, layer.value_dim):
                shapes.append((num_pages + 1, layer.kv_heads, page_size, dim))
        offsets = [0]
        for pages, heads, tokens, dim in shapes:
            # Each array starts aligned, whatever the dims before it.
            offsets.append(offsets[-1] + -(-pages * heads * tokens * dim // granule) * granule)
        self._slab = namespace.allocate(offsets[-1], storage_dtype(dtype))
        flat = namespace.to_torch(self._slab, torch_dtype(dtype))
        views = [
            flat[offset : offset + pages * heads * tokens * dim].view(pages, heads, tokens, dim)
            for offset, (pages, heads, tokens, dim) in zip(offsets, shapes, strict=False)
        ]
        self._layers = list(zip(views[0::2], views[1::2], strict=True))
        for pages_of_layer in views:
            pages_of_layer[0].zero_()
        self._statistics = KVPoolStatistics(
            num_layers=len(layers),
            num_pages=num_pages,
            page_size=page_size,
            bytes_per_page=bytes_per_page(layers, page_size, dtype),
            slab_bytes=offsets[-1] * item_size,
            dtype=dtype,
        )

    @staticmethod
    def bytes_per_page(layers: Sequence[LayerKV], page_size: int, dtype: KVDType) -> int:
        """See the function of the same name."""
        return bytes_per_page(layers, page_size, dtype)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Key pages and value pages of a layer; views of the slab."""
        return self._layers[index]

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
