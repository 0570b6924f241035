"""What this machine's cores can do at most: bytes read from memory and products computed, for comparisons."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ringserve.kernels.cpu.aligned import aligned_zeros
from ringserve.kernels.cpu.compiled import compiled
from ringserve.kernels.cpu.features import Level
from ringserve.kernels.cpu.pair_product import pair_product
from ringserve.kernels.cpu.vector import add, broadcast, sum_lanes
from ringserve.kernels.cpu.vector_memory import load

READ_BYTES = 128 << 20
"""Each thread reads so much, several times the caches."""
ROWS, VECTORS, PAIRS, REPEATS = 6, 4, 32, 100_000


@compiled
def read_range(start: int, size: int) -> Any:
    """Add up ``size`` bytes (a multiple of 256) as float32."""
    zero = broadcast(np.float32(0))
    s0, s1, s2, s3 = zero, zero, zero, zero
    for at in range(start, start + size, 256):
        s0, s1 = add(s0, load(at)), add(s1, load(at + 64))
        s2, s3 = add(s2, load(at + 128)), add(s3, load(at + 192))
    return sum_lanes(add(add(s0, s1), add(s2, s3)))


@compiled
def _multiply(level: Any, a: int, b: int, out: int, repeats: int) -> None:
    for _ in range(repeats):
        pair_product(level, a, 4 * PAIRS, b, 64 * VECTORS, 64, PAIRS, out, 64 * VECTORS, None, ROWS, VECTORS, b)


def _together(threads: int, work: Callable[[int], None]) -> float:
    """Seconds that ``work`` takes on all threads at once."""
    gate = threading.Barrier(threads + 1)

    def body(index: int) -> None:
        gate.wait()
        work(index)
        gate.wait()

    workers = [threading.Thread(target=body, args=(index,)) for index in range(threads)]
    for worker in workers:
        worker.start()
    gate.wait()
    started = time.perf_counter()
    gate.wait()
    elapsed = time.perf_counter() - started
    for worker in workers:
        worker.join()
    return elapsed


def read_bandwidth(threads: int) -> float:
    """Bytes a second that ``threads`` threads read from memory."""
    memory = aligned_zeros((threads * READ_BYTES,), np.uint8)
    memory[:] = 0
    start = memory.ctypes.data
    read_range(start, 256)
    seconds = min(_together(threads, lambda i: read_range(start + i * READ_BYTES, READ_BYTES)) for _ in range(5))
    return threads * READ_BYTES / seconds


def bfloat16_rate(threads: int, level: Level) -> float:
    """Operations (a product and its addition are two) a second on operands in the first cache."""
    size = 64 * VECTORS * PAIRS
    memory = aligned_zeros((threads, 3 * size), np.uint8)
    base = memory.ctypes.data

    def work(index: int, repeats: int = REPEATS) -> None:
        at = base + index * 3 * size
        _multiply(level, at, at + size, at + 2 * size, repeats)

    work(0, 1)
    seconds = min(_together(threads, work) for _ in range(3))
    return threads * REPEATS * ROWS * VECTORS * PAIRS * 64 / seconds
