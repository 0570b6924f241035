"""The executor's half of swapping: sizes, errors, and the order of a message's transfers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from late_lane import LateLane

from ringserve.engine.array_namespace import NumpyNamespace
from ringserve.engine.kv_pool import KVPool, LayerKV
from ringserve.engine.model_error import ModelError
from ringserve.engine.page_swaps import SwapInfo, apply_swaps, choose_swap_space, measure_swaps
from ringserve.engine.swap_pool import SwapPool, make_swap_pool
from ringserve.kernels.page_copy import gather_pages, scatter_pages
from ringserve.messages.columns import pack_i32
from ringserve.messages.steps import PageSwaps, SchedulerOutput

GIB = 1 << 30
PAGE = 2 * 2 * 8 * 4 * 4
"""Bytes: keys and values, heads, dimensions, tokens, float32."""


def pool_of(num_pages: int) -> KVPool:
    """Each page holds its own number."""
    pool = KVPool([LayerKV(2, 8, 8)], num_pages, 4, "float32")
    for array in pool.layer(0):
        array[:] = torch.arange(num_pages + 1, dtype=torch.float32)[:, None, None, None]
    return pool


def numbers(pool: KVPool) -> list[int]:
    """What the pages 1, 2, ... hold, the same everywhere in a page."""
    keys, values = pool.layer(0)
    assert torch.equal(keys, values)
    assert torch.equal(keys.amin((1, 2, 3)), keys.amax((1, 2, 3)))
    return [int(number) for number in keys[1:, 0, 0, 0]]


def swap_pool_of(pool: KVPool, swap_space: int) -> SwapPool | None:
    return make_swap_pool(pool, swap_space, NumpyNamespace(), LateLane(), gather_pages, scatter_pages)


def step(out: list[int], out_host: list[int], back: list[int], back_host: list[int]) -> SchedulerOutput:
    swaps = PageSwaps(pack_i32(out), pack_i32(out_host), pack_i32(back), pack_i32(back_host))
    return SchedulerOutput(7, (), b"", b"", b"", b"", b"", swaps=swaps)


def test_how_much_of_the_host_is_taken() -> None:
    assert choose_swap_space(None, 4 * GIB, 100 * GIB) == 4 * GIB
    assert choose_swap_space(None, 4 * GIB, 8 * GIB) == 2 * GIB
    assert choose_swap_space(None, 0, 8 * GIB) == 0
    assert choose_swap_space(7 * GIB, 4 * GIB, 8 * GIB) == 7 * GIB
    assert choose_swap_space(0, 4 * GIB, 8 * GIB) == 0
    with pytest.raises(ModelError, match=rf"--swap-space {9 * GIB} does not fit .* \({8 * GIB} bytes are free"):
        choose_swap_space(9 * GIB, 4 * GIB, 8 * GIB)


def test_sizes() -> None:
    pool = pool_of(3)
    assert pool.statistics().bytes_per_page == PAGE
    assert swap_pool_of(pool, 0) is None
    assert measure_swaps(None) == SwapInfo(0, 0, 0.0)
    swap_pool = swap_pool_of(pool, 5 * PAGE + 1)
    info = measure_swaps(swap_pool)
    assert (info.num_host_pages, info.bytes_per_page) == (5, PAGE)
    assert info.bytes_per_second > 0
    with pytest.raises(ModelError, match="holds no KV page"):
        swap_pool_of(pool, PAGE - 1)


@pytest.mark.parametrize(("num_pages", "num_host_pages"), [(100, 9), (4, 200)])
def test_measuring_leaves_no_trace(num_pages: int, num_host_pages: int) -> None:
    pool = pool_of(num_pages)
    swap_pool = swap_pool_of(pool, num_host_pages * PAGE)
    assert swap_pool is not None
    assert swap_pool.measure() > 0
    assert numbers(pool) == list(range(1, num_pages + 1))
    assert (swap_pool.statistics().pages_out, swap_pool.statistics().pages_in) == (0, 0)


def test_a_host_without_the_memory() -> None:
    class Full(NumpyNamespace):
        def allocate_host(self, num_bytes: int) -> Any:
            raise MemoryError

    with pytest.raises(ModelError, match="does not fit into the host's memory; set a smaller one"):
        make_swap_pool(pool_of(3), 5 * PAGE, Full(), LateLane(), gather_pages, scatter_pages)


def test_what_goes_out_goes_before_what_comes_in() -> None:
    """The second message brings a page back into one that it takes away."""
    pool = pool_of(4)
    swap_pool = swap_pool_of(pool, 5 * PAGE)
    apply_swaps(swap_pool, step([2, 3], [0, 4], [], []))
    for array in pool.layer(0):  # given to somebody else at once
        array[2:4] = 50.0
    apply_swaps(swap_pool, step([1, 4], [2, 1], [1, 3], [4, 0]))
    assert numbers(pool) == [3, 50, 2, 4]
    apply_swaps(swap_pool, step([], [], [4, 2], [2, 1]))
    assert numbers(pool) == [3, 4, 2, 1]


def test_what_goes_out_may_come_back_with_the_same_message() -> None:
    """Also through more than one stage, in another order, and beside pages that went out before."""
    pool = pool_of(200)
    swap_pool = swap_pool_of(pool, 200 * PAGE)
    apply_swaps(swap_pool, step([200], [0], [], []))
    out, host = list(range(1, 151)), list(range(1, 151))
    apply_swaps(swap_pool, step(out, host, [*range(151, 0, -1)], [*range(151)]))
    assert numbers(pool) == [*range(150, 0, -1), 200, *range(152, 201)]


def test_messages_that_do_not_fit_raise() -> None:
    apply_swaps(None, SchedulerOutput(7, (), b"", b"", b"", b"", b""))
    with pytest.raises(RuntimeError, match=r"step 7: .* no swap space"):
        apply_swaps(None, step([1], [0], [], []))
    swap_pool = swap_pool_of(pool_of(4), 5 * PAGE)
    for bad in (step([5], [0], [], []), step([1], [5], [], []), step([1], [0, 1], [], []), step([], [], [0], [0])):
        with pytest.raises(ValueError, match="page"):
            apply_swaps(swap_pool, bad)
