"""The thread team: every tile of every operation exactly once, in the order of the operations, whoever comes late."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from numba import njit
from numba.extending import register_jitable

from ringserve.kernels.cpu.aligned import aligned_zeros
from ringserve.kernels.cpu.atomics import fetch_add, load_acquire, pause
from ringserve.kernels.cpu.team import (
    EPOCH_MASK,
    RECORD,
    STOP,
    Team,
    await_step,
    claim,
    make_walk,
    next_epoch,
    set_operation,
    start_step,
)

MAX_OPERATIONS, MAX_TILES = 24, 40


@register_jitable
def _run_tile(operation: Any, tile: Any, thread: Any, context: Any) -> None:
    """Tile t of an operation adds all results of the operation before it: a lost, doubled or early tile shows."""
    tiles, results, runs, delays = context
    for _ in range(delays[thread, (operation * 7 + tile) % delays.shape[1]]):
        pause()
    total = np.int64(tile + 1)
    if operation > 0:
        for i in range(tiles[operation - 1]):
            total += results[operation - 1, i]
    results[operation, tile] = total & 0xFFFFFFFF
    fetch_add(runs.ctypes.data + 8 * (operation * runs.shape[1] + tile), 1)


_walk = make_walk(_run_tile)


@njit(nogil=True)
def _step(header: Any, records: Any, tiles: Any, results: Any, runs: Any, delays: Any) -> Any:
    epoch = next_epoch(header)
    for i in range(tiles.shape[0]):
        set_operation(records + i * RECORD, epoch, tiles[i])
    start_step(header)
    return _walk(records, tiles.shape[0], epoch, 0, (tiles, results, runs, delays), 0)


@njit(nogil=True)
def _help(header: Any, thread: Any, records: Any, tiles: Any, results: Any, runs: Any, delays: Any) -> None:
    seen = 0
    while True:
        seen = await_step(header, seen)
        if seen < 0:
            return
        # Late by as much as a few steps take.
        for _ in range(delays[thread, seen % delays.shape[1]] * 50):
            pause()
        _walk(records, tiles.shape[0], seen, thread, (tiles, results, runs, delays), 0)


def expected_results(tiles: Any) -> Any:
    results = np.zeros((MAX_OPERATIONS, MAX_TILES), np.int64)
    total = 0
    for operation, count in enumerate(tiles.tolist()):
        for tile in range(count):
            results[operation, tile] = (tile + 1 + total) & 0xFFFFFFFF
        total = int(results[operation, :count].sum())
    return results


@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
def test_random_programs_with_late_helpers(num_threads: int) -> None:
    rng = np.random.default_rng(num_threads)
    records = aligned_zeros((MAX_OPERATIONS * RECORD,), np.uint8)
    tiles = np.zeros(MAX_OPERATIONS, np.int64)
    results, runs = (np.zeros((MAX_OPERATIONS, MAX_TILES), np.int64) for _ in range(2))
    delays = np.zeros((4, 13), np.int64)
    state = (records.ctypes.data, tiles, results, runs, delays)
    stopped = np.zeros(8, np.int64)
    stopped[STOP // 8] = 1
    _help(stopped.ctypes.data, 1, *state)
    team = Team(num_threads, lambda header, thread: _help(header, thread, *state))
    try:
        for step in range(300):
            # Nobody holds a tile between two steps: the leader may write.
            tiles[:] = rng.integers(0, MAX_TILES + 1, MAX_OPERATIONS) * (rng.random(MAX_OPERATIONS) < 0.8)
            delays[:] = rng.integers(0, 40, delays.shape) * (rng.random(delays.shape) < (0.3 if step % 3 else 0.0))
            results[:] = 0
            runs[:] = 0
            assert _step(team.header, *state)
            assert np.array_equal(runs, (np.arange(MAX_TILES) < tiles[:, None]).astype(np.int64))
            assert np.array_equal(results, expected_results(tiles))
    finally:
        team.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("compute-")]


@njit
def _set(record: Any, epoch: Any, tiles: Any) -> None:
    set_operation(record, epoch, tiles)


@njit
def _claim(record: Any, epoch: Any) -> Any:
    return claim(record, epoch)


@njit
def _load(address: Any) -> Any:
    return load_acquire(address)


def test_a_helper_of_an_earlier_step_claims_nothing() -> None:
    memory = aligned_zeros((RECORD,), np.uint8)
    record = memory.ctypes.data
    _set(record, 7, 3)
    assert _claim(record, 7) == 0
    _set(record, 8, 2)
    before = _load(record)
    assert _claim(record, 7) == -2
    assert _load(record) == before
    assert [_claim(record, 8) for _ in range(3)] == [0, 1, -1]


def test_the_epoch_may_wrap_around() -> None:
    memory = aligned_zeros((RECORD,), np.uint8)
    record = memory.ctypes.data
    for epoch in (EPOCH_MASK, EPOCH_MASK + 1, 5 * (EPOCH_MASK + 1) + 3):
        _set(record, epoch, 1)
        assert _claim(record, epoch) == 0
        assert _claim(record, epoch - 1) == -2
        assert _claim(record, epoch) == -1
