"""The pool's layout: views of one slab, aligned, disjoint, of the right size."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from ringserve.engine.array_namespace import ALIGNMENT, CupyNamespace, NumpyNamespace, array_namespace
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


@pytest.mark.parametrize("dtype", ["int8", "float8"])
def test_8_bit_pages_have_scales(dtype: Literal["int8", "float8"]) -> None:
    pool = KVPool(LAYERS, num_pages=6, page_size=16, dtype=dtype)
    assert pool.statistics().bytes_per_page == (3 * 128 + 128 + 2 * 12 + 4 * 2 * (3 + 1 + 2)) * 16
    for index, layer in enumerate(LAYERS):
        keys, values = pool.layer(index)
        scales = pool.scales(index)
        assert scales is not None
        assert keys.dtype == values.dtype == (torch.int8 if dtype == "int8" else torch.uint8)
        for scale in scales:
            assert scale.shape == (7, layer.kv_heads, 16)
            assert scale.dtype == torch.float32
            assert scale.data_ptr() % ALIGNMENT == 0
    assert KVPool(LAYERS, 6, 16, "float16").scales(0) is None


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "float8"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_the_layout_describes_every_array(
    dtype: Literal["float32", "float16", "bfloat16", "int8", "float8"], page_size: int
) -> None:
    pool = KVPool(LAYERS, num_pages=3, page_size=page_size, dtype=dtype)
    arrays = [array for i in range(3) for array in (*pool.layer(i), *(pool.scales(i) or ()))]
    layout, word = pool.layout, pool.slab.element_size()
    assert layout.num_arrays == len(arrays)
    assert layout.page_words * word == pool.statistics().bytes_per_page
    for array, offset, size in zip(arrays, layout.offsets.tolist(), layout.sizes.tolist(), strict=True):
        for page in (0, 2):
            assert array[page].data_ptr() == pool.slab.data_ptr() + (offset + page * size) * word


class _FakeCupy(ModuleType):
    """CuPy's names over numpy's memory."""

    def __init__(self, limit: int) -> None:
        super().__init__("cupy")
        self.allocators: list[object] = []
        self.taken = 0
        fake = self

        class OutOfMemoryError(Exception):
            pass

        class MemoryPool:
            def malloc(self) -> None:
                pass

        @contextmanager
        def using_allocator(allocator: object) -> Iterator[None]:
            fake.allocators.append(allocator)
            yield
            fake.allocators.pop()

        def empty(size: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
            assert fake.allocators, "not from the pool of its own"
            if size * dtype.itemsize > limit:
                raise OutOfMemoryError("out of memory")
            return NumpyNamespace().allocate(size, dtype)

        class CUDARuntimeError(RuntimeError):
            pass

        class PinnedMemory:
            def __init__(self, size: int) -> None:
                if size > limit:
                    raise CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
                fake.taken += size
                self.memory = bytearray(size)

        self.empty = empty
        self.cuda = SimpleNamespace(
            PinnedMemory=PinnedMemory,
            PinnedMemoryPointer=lambda memory, offset: memoryview(memory.memory)[offset:],
            runtime=SimpleNamespace(CUDARuntimeError=CUDARuntimeError),
            Device=lambda index: nullcontext(),
            MemoryPool=MemoryPool,
            using_allocator=using_allocator,
            memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
        )


def test_cupy_memory_comes_from_a_pool_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", _FakeCupy(limit=1 << 20))
    namespace = CupyNamespace(1)
    assert namespace.device == torch.device("cuda", 1)
    array = namespace.allocate(100, np.dtype(np.int64))
    tensor = namespace.to_torch(array, torch.int64)
    tensor[3] = 17
    assert int(array[3]) == 17
    with pytest.raises(MemoryError, match="out of memory"):
        namespace.allocate(1 << 20, np.dtype(np.int64))


def test_pinned_memory_is_as_much_as_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy's own pool of it would take the next power of two."""
    fake = _FakeCupy(limit=1 << 20)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    namespace = CupyNamespace()
    array = namespace.allocate_host((1 << 19) + 1)
    assert fake.taken == array.nbytes == (1 << 19) + 1
    torch.from_numpy(array)[7] = 9
    assert array[7] == 9
    with pytest.raises(MemoryError, match="bytes of pinned host memory"):
        namespace.allocate_host((1 << 20) + 1)
