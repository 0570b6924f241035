"""The pool's layout: views of one slab, aligned, disjoint, of the right size."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch

from ringserve.engine.array_namespace import ALIGNMENT, NumpyNamespace, array_namespace
from ringserve.engine.kv_pool import KVPool, LayerKV, bytes_per_page

LAYERS = [LayerKV(3, 64, 64), LayerKV(1, 80, 48), LayerKV(2, 5, 7)]


@pytest.mark.parametrize(("dtype", "torch_type"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_layers_are_disjoint_aligned_views_of_one_slab(
    dtype: Literal["float32", "bfloat16"], torch_type: torch.dtype
) -> None:
    pool = KVPool(LAYERS, num_pages=6, page_size=16, dtype=dtype)
    views = [view for i in range(len(LAYERS)) for view in pool.layer(i)]
    expected = [(7, layer.kv_heads, 16, dim) for layer in LAYERS for dim in (layer.key_dim, layer.value_dim)]
    assert [tuple(view.shape) for view in views] == expected
    for number, view in enumerate(views):
        assert view.dtype == torch_type
        assert view.is_contiguous()
        assert view.data_ptr() % ALIGNMENT == 0
        assert not view[0].any()  # The reserved page.
        view[1:] = number + 1
    for number, view in enumerate(views):
        assert bool((view[1:] == number + 1).all())
    first = views[0].data_ptr()
    last = views[-1]
    end = last.data_ptr() + last.numel() * last.element_size()
    assert end - first <= pool.statistics().slab_bytes < end - first + ALIGNMENT


def test_sizes() -> None:
    pool = KVPool(LAYERS, num_pages=6, page_size=16, dtype="bfloat16")
    size = (3 * 128 + 128 + 2 * 12) * 16 * 2
    assert bytes_per_page(LAYERS, 16, "bfloat16") == KVPool.bytes_per_page(LAYERS, 16, "bfloat16") == size
    assert bytes_per_page(LAYERS, 16, "float32") == 2 * size
    statistics = pool.statistics()
    assert (statistics.num_layers, statistics.num_pages, statistics.capacity_tokens) == (3, 6, 96)
    assert statistics.bytes_per_page == size
    assert (pool.num_pages, pool.page_size) == (6, 16)


def test_memory_is_committed_only_when_written() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096

    before = resident()
    pool = KVPool([LayerKV(8, 128, 128)] * 4, num_pages=4000, page_size=16, dtype="bfloat16")
    assert pool.statistics().slab_bytes > 1000 * 2**20
    assert resident() - before < 100 * 2**20


def test_bfloat16_is_kept_as_its_bits() -> None:
    array = NumpyNamespace().allocate(4, np.dtype(np.uint16))
    tensor = array_namespace("cpu").to_torch(array, torch.bfloat16)
    tensor[:] = torch.tensor([1.0, -2.0, 0.5, 0.0])
    assert array.tolist() == [0x3F80, 0xC000, 0x3F00, 0]


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one page"):
        KVPool(LAYERS, 0, 16, "float32")
    with pytest.raises(ValueError, match="power of two"):
        KVPool(LAYERS, 1, 24, "float32")
