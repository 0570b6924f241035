"""Swapping: bookkeeping, costs, and that data survives whatever order the transfers run in."""

from __future__ import annotations

from random import Random

import pytest
import torch
from late_lane import LateLane

from ringserve.engine.array_namespace import KVDType, NumpyNamespace
from ringserve.engine.kv_pool import KVPool, LayerKV
from ringserve.engine.swap_pool import SwapPool
from ringserve.engine.swap_space import SwapCosts, SwapSpace
from ringserve.engine.transfer_lane import ImmediateLane, TransferLane
from ringserve.kernels.page_copy import copy_pages, gather_pages, scatter_pages

LAYERS = [LayerKV(2, 16, 16), LayerKV(1, 24, 8)]


def _swap_pool(pool: KVPool, num_pages: int, lane: TransferLane, stage_pages: int = 3) -> SwapPool:
    return SwapPool(pool, num_pages, NumpyNamespace(), lane, gather_pages, scatter_pages, stage_pages)


def _fill(pool: KVPool, page: int, value: int) -> None:
    for index in range(len(LAYERS)):
        for number, array in enumerate([*pool.layer(index), *(pool.scales(index) or ())]):
            array[page] = (value + 7 * index + number) % 100


def _holds(pool: KVPool, page: int, value: int) -> bool:
    return all(
        bool((array[page] == (value + 7 * index + number) % 100).all())
        for index in range(len(LAYERS))
        for number, array in enumerate([*pool.layer(index), *(pool.scales(index) or ())])
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "float8"])
@pytest.mark.parametrize("lane_type", [ImmediateLane, LateLane])
def test_pages_survive_any_order_of_swaps(dtype: KVDType, lane_type: type[ImmediateLane | LateLane]) -> None:
    """The scheduler's view: a device page is given away as soon as its swap was asked for, a host page as soon as it
    was asked back."""
    random = Random(f"{dtype} {lane_type.__name__}")
    pool = KVPool(LAYERS, num_pages=12, page_size=8, dtype=dtype)
    swap, space = _swap_pool(pool, 10, lane_type()), SwapSpace(10)
    free, running, swapped = list(range(1, 13)), {}, {}
    for number in range(400):
        action = random.choice(["start", "out", "in", "end"])
        if action == "start" and len(free) >= 4:
            random.shuffle(free)
            running[number] = [free.pop() for _ in range(random.randint(1, 4))]
            for i, page in enumerate(running[number]):
                _fill(pool, page, number + i)
        elif action == "out" and running:
            name = random.choice(list(running))
            host = space.take(name, len(running[name]))
            if host is not None:
                swap.swap_out(running[name], host)
                swapped[name] = host
                free += running.pop(name)
        elif action == "in" and swapped:
            name = random.choice(list(swapped))
            if len(swapped[name]) <= len(free):
                random.shuffle(free)
                running[name] = [free.pop() for _ in swapped[name]]
                assert space.release(name) == swapped[name]
                swap.swap_in(swapped.pop(name), running[name])
                assert all(_holds(pool, page, name + i) for i, page in enumerate(running[name]))
        elif action == "end" and running:
            name = random.choice(list(running))
            assert all(_holds(pool, page, name + i) for i, page in enumerate(running[name]))
            free += running.pop(name)
        assert space.check_integrity() == []
    statistics = swap.statistics()
    assert statistics.pages_out > 40
    assert statistics.pages_in > 20
    assert statistics.bytes_per_page == pool.statistics().bytes_per_page
    assert not bool(pool.layer(0)[0][0].any())


def test_wrong_pages_are_refused() -> None:
    pool = KVPool(LAYERS, num_pages=4, page_size=8, dtype="bfloat16")
    swap = _swap_pool(pool, 3, ImmediateLane())
    for device, host in (([0], [0]), ([5], [0]), ([1], [3]), ([1], [-1]), ([1, 2], [0])):
        with pytest.raises(ValueError, match="page"):
            swap.swap_out(device, host)
        with pytest.raises(ValueError, match="page"):
            swap.swap_in(host, device)
    with pytest.raises(ValueError, match="needs pages"):
        _swap_pool(pool, 0, ImmediateLane())
    assert swap.statistics().pages_out == 0


def test_space_is_given_and_taken_back() -> None:
    space = SwapSpace(5)
    assert space.take("a", 3) == [0, 1, 2]
    assert space.take("b", 3) is None
    assert space.take("b", 2) == [3, 4]
    with pytest.raises(ValueError, match="already has pages"):
        space.take("a", 0)
    assert space.holds("a")
    assert space.release("a") == [0, 1, 2]
    assert not space.holds("a")
    with pytest.raises(KeyError):
        space.release("a")
    assert space.num_free == 3
    assert space.check_integrity() == []


def test_swapping_pays_for_long_sequences_of_slow_models() -> None:
    # 8B at bfloat16: 2 MiB for 16 tokens; PCIe 5: 50 GB/s; 20,000 tokens/s of prefill.
    costs = SwapCosts(bytes_per_page=2 << 20, bytes_per_second=50e9)
    assert costs.should_swap(num_pages=100, recompute_seconds=1600 / 20_000)
    assert not costs.should_swap(num_pages=1, recompute_seconds=1 / 20_000)
    slow = SwapCosts(bytes_per_page=2 << 20, bytes_per_second=5e9)
    assert not slow.should_swap(num_pages=100, recompute_seconds=1600 / 1_000_000)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8"])
def test_copy_on_write_copies_all_layers(dtype: KVDType) -> None:
    pool = KVPool(LAYERS, num_pages=6, page_size=8, dtype=dtype)
    for page in range(1, 7):
        _fill(pool, page, page)
    copy_pages(pool.slab, torch.tensor([1, 2, -1]), torch.tensor([5, 6, 3]), pool.layout)
    assert [_holds(pool, page, value) for page, value in ((1, 1), (2, 2), (3, 3), (4, 4), (5, 1), (6, 2))] == [True] * 6
    copy_pages(pool.slab, torch.tensor([-1]), torch.tensor([1]), pool.layout)
    assert _holds(pool, 1, 1)
