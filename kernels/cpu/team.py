"""A team of threads that walks through a step's operations without ever waiting for a thread that has nothing to do.

A step is a list of operations, each cut into tiles. Every thread walks the list; it *claims* the next tile of the
current operation with a compare-and-swap, computes it and counts it as *done*. An operation is over when all its tiles
are done, not when all threads have arrived: a thread that the operating system has put aside between two tiles holds up
nobody, and the others do its share. (A barrier would wait for it, once in every operation.)

One record of 64 bytes for each operation::

    claim word:  | epoch: 24 bits | number of tiles: 20 | next tile: 20 |
    done word:   | epoch: 24 bits | 20 bits of zeros     | tiles done: 20 |     (offset 8)

The epoch is the step's number. A thread that wakes up late, in the middle of another step, meets another epoch in the
word that it wants to change and can claim nothing; what it then reads of an operation is never used. A claim succeeds
only while the step runs, and the step cannot end before that claim's tile is done: so whoever holds a tile may read the
step's inputs. An epoch comes round again after 16 million steps, which a thread would have to sleep through between
a load and the compare-and-swap after it.

The header, 64 bytes: epoch (the low 32 bits are a futex), sleeping threads (offset 8), stop (16).

Helpers sleep between steps; the leader (the caller of ``start_step`` and ``walk``) wakes them and begins at once.
Ordering: inputs and counters are written before the header's epoch is released; a claim acquires; ``done`` releases a
tile's results and acquires those of others. Threads of Python that never touch it while they work.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.extending import register_jitable

from ringserve.kernels.cpu.aligned import aligned_zeros
from ringserve.kernels.cpu.atomics import compare_exchange, fetch_add, load_acquire, pause, read_clock, store_release
from ringserve.kernels.cpu.compiled import compiled
from ringserve.kernels.cpu.llvm import store_i64

RECORD = 64
"""Bytes of an operation's record, and of the header."""

MAX_TILES = (1 << 20) - 1
DONE, SLEEPING, STOP = 8, 8, 16
EPOCH_MASK = (1 << 24) - 1
EPOCH_SHIFT, TILES_SHIFT, TILE_MASK = 40, 20, (1 << 20) - 1

SPINS = 2000
"""Looks at an operation's end (some 20 ns apart) before the processor is offered to others."""
SPINS_BETWEEN_STEPS = 500
"""The same before a helper sleeps: the other processes of the server want the core between two steps."""

FUTEX = {"x86_64": 202, "AMD64": 202, "aarch64": 98}.get(platform.machine(), -1)
"""The system call's number."""
FUTEX_WAIT_PRIVATE, FUTEX_WAKE_PRIVATE = 128, 129

_syscall = types.ExternalFunction(
    "syscall", types.int64(types.int64, types.int64, types.int64, types.int64, types.int64, types.int64)
)
_sched_yield = types.ExternalFunction("sched_yield", types.int32())


@register_jitable
def claim(record: Any, epoch: Any) -> Any:
    """A tile of the operation; -1: none is left; -2: the step is over."""
    while True:
        word = load_acquire(record)
        if (word >> EPOCH_SHIFT) & EPOCH_MASK != epoch & EPOCH_MASK:
            return -2
        tile = word & TILE_MASK
        if tile >= (word >> TILES_SHIFT) & TILE_MASK:
            return -1
        if compare_exchange(record, word, word + 1) == word:
            return tile


@register_jitable
def finish(record: Any) -> None:
    """Count a claimed tile as done."""
    fetch_add(record + DONE, 1)


@register_jitable
def await_operation(record: Any, epoch: Any) -> Any:
    """Wait until all tiles are done. False: the step is over."""
    spins = 0
    while True:
        word = load_acquire(record)
        done = load_acquire(record + DONE)
        mine = epoch & EPOCH_MASK
        if (word >> EPOCH_SHIFT) & EPOCH_MASK != mine or (done >> EPOCH_SHIFT) & EPOCH_MASK != mine:
            return False
        if done & TILE_MASK == (word >> TILES_SHIFT) & TILE_MASK:
            return True
        spins += 1
        if spins < SPINS:
            pause()
        else:  # whoever holds the tile may be waiting for this very processor
            _sched_yield()


@register_jitable
def set_operation(record: Any, epoch: Any, num_tiles: Any) -> None:
    """The leader, before ``start_step``: the operation has ``num_tiles`` tiles in this step (0: nothing to do)."""
    mine = (epoch & EPOCH_MASK) << EPOCH_SHIFT
    store_release(record + DONE, mine)
    store_release(record, mine | (num_tiles << TILES_SHIFT))


@register_jitable
def next_epoch(header: Any) -> Any:
    """The leader: the number of the step that is being prepared."""
    return load_acquire(header) + 1


@register_jitable
def start_step(header: Any) -> None:
    """The leader: let the helpers in."""
    fetch_add(header, 1)
    if fetch_add(header + SLEEPING, 0) > 0:
        _syscall(FUTEX, header, FUTEX_WAKE_PRIVATE, 1 << 20, 0, 0)


def make_walk(run_tile: Any) -> Any:
    """``walk(records, num_operations, epoch, thread, context, stamps)`` for compiled code: take part in a step, with
    ``run_tile(operation, tile, thread, context)`` computing the tiles claimed. True: every operation is done.

    ``stamps``: 0, or where the processor's clock is written (int64) at the start and after each operation.
    """

    @register_jitable
    def walk(records: Any, num_operations: Any, epoch: Any, thread: Any, context: Any, stamps: Any) -> Any:
        if stamps != 0:
            store_i64(stamps, read_clock())
        for operation in range(num_operations):
            record = records + operation * RECORD
            while True:
                tile = claim(record, epoch)
                if tile < 0:
                    break
                run_tile(operation, tile, thread, context)
                finish(record)
            if tile == -2 or not await_operation(record, epoch):
                return False
            if stamps != 0:
                store_i64(stamps + 8 * (operation + 1), read_clock())
        return True

    return walk


@register_jitable
def await_step(header: Any, seen: Any) -> Any:
    """A helper: the number of a step after ``seen``; -1: stop."""
    spins = 0
    while True:
        epoch = load_acquire(header)
        if load_acquire(header + STOP) != 0:
            return -1
        if epoch != seen:
            return epoch
        spins += 1
        if spins < SPINS_BETWEEN_STEPS:
            pause()
            continue
        fetch_add(header + SLEEPING, 1)
        # The kernel compares once more: a step that started since is not slept through.
        _syscall(FUTEX, header, FUTEX_WAIT_PRIVATE, epoch & 0xFFFFFFFF, 0, 0)
        fetch_add(header + SLEEPING, -1)


@compiled
def _stop(header: int) -> None:
    store_release(header + STOP, 1)
    fetch_add(header, 1)
    _syscall(FUTEX, header, FUTEX_WAKE_PRIVATE, 1 << 20, 0, 0)


class Team:
    """The header and the helper threads.

    ``helper(header, thread)`` is compiled code without the GIL that loops over ``await_step`` and ``walk`` and returns
    when ``await_step`` says stop; ``thread`` counts from 1 (0 is the leader, the caller of everything else here).
    """

    def __init__(self, num_threads: int, helper: Callable[[int, int], None]) -> None:
        if FUTEX < 0 and num_threads > 1:
            raise ValueError(f"no system call is known for threads that wait on {platform.machine()}")
        self._memory = aligned_zeros((RECORD,), np.uint8)
        self.header: int = self._memory.ctypes.data
        self.num_threads = num_threads
        self._threads = [
            threading.Thread(target=helper, args=(self.header, index), name=f"compute-{index}", daemon=True)
            for index in range(1, num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the helpers. Not while a step runs."""
        if self._threads:
            _stop(self.header)
            for thread in self._threads:
                thread.join()
            self._threads = []
