"""A CPU's KV pool as tensors, and its swap pool: for modelling code, and for those who asked for swapping."""

from __future__ import annotations

from collections.abc import Sequence

from ringserve.engine.array_namespace import NumpyNamespace
from ringserve.engine.kv_layout import KVDType, LayerKV
from ringserve.engine.kv_pool import KVPool
from ringserve.engine.swap_pool import SwapPool, make_swap_pool
from ringserve.engine.transfer_lane import ImmediateLane
from ringserve.kernels.page_copy import gather_pages, scatter_pages


def torch_pages(
    layers: Sequence[LayerKV], num_pages: int, page_size: int, dtype: KVDType, swap_space: int
) -> tuple[KVPool, SwapPool | None]:
    """``swap_space``: bytes, 0: no swap pool. Raises MemoryError where the pages do not fit, ModelError where the swap
    pool does not."""
    pool = KVPool(layers, num_pages, page_size, dtype)
    swap_pool = make_swap_pool(pool, swap_space, NumpyNamespace(), ImmediateLane(), gather_pages, scatter_pages)
    return pool, swap_pool
