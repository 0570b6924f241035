"""Decode attention on a CPU: bfloat16 and int8 pages, and what the memory gives.

    python -P -m ringserve.bench.cpu_attention --output bench/results/cpu-attention.json

Every sequence has one query; keys and values lie in pages all over a pool that is larger than the caches, as after some
time of serving, in as many layers as fit into ``--memory``. One thread, in its own CPU time, the columns in turn in
each round: bfloat16 pages, int8 pages, the same bfloat16 pages merely read (the next one asked for while one is added
up, as attention does), and a sequential read, which the processor's own prefetchers speed up.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from rich.console import Console
from rich.table import Table

from ringserve.bench.machine import describe
from ringserve.bench.module_command import at_least_one, module_parser, run_module
from ringserve.bench.report import check_writable, write_json
from ringserve.engine.fast_weights import MAX_HEAD_DIM
from ringserve.engine.kv_pool import KVPool, LayerKV
from ringserve.kernels.cpu.aligned import aligned_zeros
from ringserve.kernels.cpu.attention_inputs import MAX_ROWS, Int8Pages, Pages, QueryRows
from ringserve.kernels.cpu.features import host_level
from ringserve.kernels.cpu.llvm import load_i32
from ringserve.kernels.cpu.paged_attention import LOG2_E, attend, scratch_bytes
from ringserve.kernels.cpu.paged_attention_int8 import attend_int8, scratch_bytes_int8
from ringserve.kernels.cpu.roofs import read_range
from ringserve.kernels.cpu.vector import add, broadcast, sum_lanes
from ringserve.kernels.cpu.vector_memory import load, prefetch_l2
from ringserve.options import OptionError

SEQUENTIAL_BYTES = 128 << 20
compiled = njit(nogil=True, boundscheck=False, error_model="numpy")
"""Not kept on disk: what lies there is known by the kernels' sources alone."""


@compiled
def attend_all(
    level: Any, sizes: Any, layers: Any, tables: Any, queries: int, scale: Any, scratch: int, int8: bool
) -> None:
    """``sizes``: heads of a kv head, kv heads, dim, page size, context. ``layers`` int64 [layers, 4]: addresses of
    keys, values and their scales. ``tables`` int32 [sequences, pages]."""
    group, kv_heads, dim, page_size, context = sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]
    item = 1 if int8 else 2
    for layer in range(layers.shape[0]):
        for sequence in range(tables.shape[0]):
            table = tables.ctypes.data + 4 * sequence * tables.shape[1]
            for head in range(kv_heads):
                first = head * page_size
                keys, values = layers[layer, 0] + item * dim * first, layers[layer, 1] + item * dim * first
                following = 0
                if head + 1 < kv_heads:
                    following = keys + item * dim * page_size * (1 + kv_heads * load_i32(table))
                rows = QueryRows(queries, group, group, context - 1, 0, scale)
                if int8:
                    scales = layers[layer, 2] + 4 * first, layers[layer, 3] + 4 * first
                    int8_pages = Int8Pages(keys, values, scales[0], scales[1], table, kv_heads, page_size, dim)
                    attend_int8(level, rows, int8_pages, scratch, following)
                else:
                    pages = Pages(keys, values, table, kv_heads, page_size, dim)
                    attend(level, rows, pages, scratch, following)


@compiled
def read_pages(starts: Any, size: int) -> Any:
    """Add up ``size`` bytes at each address; the next one's are asked for meanwhile."""
    zero = broadcast(np.float32(0))
    s0, s1 = zero, zero
    for i in range(starts.shape[0] - 1):
        here, ahead = starts[i], starts[i + 1]
        for at in range(0, size, 128):
            prefetch_l2(ahead + at)
            prefetch_l2(ahead + at + 64)
            s0, s1 = add(s0, load(here + at)), add(s1, load(here + at + 64))
    return sum_lanes(add(s0, s1))


@dataclass
class Case:
    """One column: what to run, and the bytes of keys and values that it reads."""

    run: Callable[[], Any]
    num_bytes: int


class Bench:
    """``sequences`` sequences of ``context`` tokens in pools of both types."""

    def __init__(self, layer: LayerKV, heads: int, context: int, sequences: int, page_size: int, memory: int) -> None:
        pages_each = -(-context // page_size)
        num_pages = sequences * pages_each
        bytes_each = KVPool.bytes_per_page([layer], page_size, "bfloat16")
        self.layers = max(1, memory // (num_pages * bytes_each))
        rng = np.random.default_rng(0)
        dim = layer.key_dim
        tables = (rng.permutation(num_pages) + 1).astype(np.int32).reshape(sequences, pages_each)
        # One more entry in each row: kernels may look one page ahead.
        tables = np.concatenate([tables, np.zeros((sequences, 1), np.int32)], axis=1)
        sizes = np.array([heads // layer.kv_heads, layer.kv_heads, dim, page_size, context], np.int64)
        queries = rng.integers(0x3E00, 0x3F80, heads * dim).astype(np.uint16)
        scratch = aligned_zeros((max(scratch_bytes(dim, page_size), scratch_bytes_int8(dim, page_size)),), np.uint8)
        scale, level = np.float32(dim**-0.5 * LOG2_E), host_level()
        self._keep: list[Any] = [queries, scratch]
        self.cases: dict[str, Case] = {}
        for dtype in ("bfloat16", "int8"):
            pool = KVPool([layer] * self.layers, num_pages, page_size, "int8" if dtype == "int8" else "bfloat16")
            addresses = np.zeros((self.layers, 4), np.int64)
            for index in range(self.layers):
                arrays = [*pool.layer(index), *(pool.scales(index) or ())]
                arrays[0].view(-1).random_(-100, 100)
                arrays[1].view(-1).random_(-100, 100)
                for array in arrays[2:]:
                    array.fill_(0.01)
                addresses[index, : len(arrays)] = [array.data_ptr() for array in arrays]
            self._keep.append(pool)
            int8 = dtype == "int8"
            arguments = level, sizes, addresses, tables, queries.ctypes.data, scale, scratch.ctypes.data, int8
            token = KVPool.bytes_per_page([layer], page_size, pool.statistics().dtype) // page_size
            self.cases[dtype] = Case(partial(attend_all, *arguments), self.layers * sequences * context * token)
            if dtype == "bfloat16":
                run = 2 * page_size * dim
                places = [
                    addresses[index, part] + run * (layer.kv_heads * int(page) + head)
                    for index in range(self.layers)
                    for row in tables[:, :-1]
                    for head in range(layer.kv_heads)
                    for page in row
                    for part in (0, 1)
                ]
                starts = np.array(places, np.int64)
                self.cases["the same pages read"] = Case(partial(read_pages, starts, run), run * (len(starts) - 1))
        memory_area = aligned_zeros((SEQUENTIAL_BYTES,), np.uint8)
        memory_area[:] = 1
        self.cases["read in sequence"] = Case(
            partial(read_range, memory_area.ctypes.data, SEQUENTIAL_BYTES), SEQUENTIAL_BYTES
        )
        self._keep.append(memory_area)

    def measure(self, rounds: int) -> dict[str, dict[str, float]]:
        """Median milliseconds for a layer, and GB/s."""
        times: dict[str, list[float]] = {name: [] for name in self.cases}
        for case in self.cases.values():
            case.run()
        for _ in range(rounds):
            for name, case in self.cases.items():
                started = time.thread_time()
                case.run()
                times[name].append(time.thread_time() - started)
        found = {}
        for name, case in self.cases.items():
            seconds = statistics.median(times[name])
            found[name] = {
                "milliseconds_per_layer": 1e3 * seconds / self.layers,
                "gigabytes_per_second": case.num_bytes / seconds / 1e9,
            }
        return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and keep the result."""
    parser = module_parser(__file__, __doc__)
    parser.add_argument("--heads", type=at_least_one, default=9)
    parser.add_argument("--kv-heads", type=at_least_one, default=3)
    parser.add_argument("--dim", type=at_least_one, default=64)
    parser.add_argument("--page-size", type=at_least_one, default=64)
    parser.add_argument("--sequences", type=at_least_one, default=32)
    parser.add_argument("--context", type=at_least_one, nargs="+", default=[128, 256, 512, 1024, 2048])
    parser.add_argument("--memory", type=at_least_one, default=300 << 20, help="bytes of bfloat16 keys and values")
    parser.add_argument("--rounds", type=at_least_one, default=9)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    check_writable(options.output, "--output")
    _check_shape(options.heads, options.kv_heads, options.dim, options.page_size)
    layer = LayerKV(options.kv_heads, options.dim, options.dim)
    results = {}
    for context in options.context:
        bench = Bench(layer, options.heads, context, options.sequences, options.page_size, options.memory)
        results[str(context)] = bench.measure(options.rounds)
    _print(results)
    if options.output is not None:
        shape = {name: getattr(options, name) for name in ("heads", "kv_heads", "dim", "page_size", "sequences")}
        write_json(options.output, {"machine": describe(), "threads": 1, **shape, "contexts": results})
    return 0


def _check_shape(heads: int, kv_heads: int, dim: int, page_size: int) -> None:
    """Compiled code is told addresses only: what it was not made for, it would read and write elsewhere."""
    if heads % kv_heads or heads // kv_heads > MAX_ROWS // 2:
        raise OptionError(
            f"--heads: {heads} is not a multiple of --kv-heads ({kv_heads}), at most {MAX_ROWS // 2} times"
        )
    if dim % 16 or not 32 <= dim <= MAX_HEAD_DIM:
        raise OptionError(f"--dim: {dim} is not a multiple of 16 from 32 to {MAX_HEAD_DIM}")
    if page_size % 16:
        raise OptionError(f"--page-size: {page_size} is not a multiple of 16")


def _print(results: dict[str, dict[str, dict[str, float]]]) -> None:
    names = list(next(iter(results.values())))
    table = Table("context", *names)
    for context, columns in results.items():
        cells = []
        for name in names:
            text = f"{columns[name]['gigabytes_per_second']:.1f} GB/s"
            if name in ("bfloat16", "int8"):
                text = f"{columns[name]['milliseconds_per_layer']:.3f} ms, {text}"
            cells.append(text)
        table.add_row(context, *cells)
    Console().print(table)


if __name__ == "__main__":
    run_module(main)
