"""The CPU's linear layers beside oneDNN's, and the rows' sampling, on one thread, in the thread's CPU time.

    python -P -m ringserve.bench.cpu_linear --output bench/results/cpu-linear.json

Shapes are the default model's. Each layer's weights are repeated until they no longer fit into the caches and are used
in turn, so that they come from memory as they do in a step. The columns alternate within each round; the best round
counts. Figures: G operations/s and GB/s of weights; the read bandwidth that they are held against is measured between.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ringserve.bench.machine import OtherLoad, describe
from ringserve.bench.module_command import at_least_one, module_parser, run_module
from ringserve.kernels.cpu.aligned import aligned_zeros
from ringserve.kernels.cpu.features import Level, host_level, level_name
from ringserve.kernels.cpu.linear_bf16 import bf16_block, pack_bf16, padded, to_bf16
from ringserve.kernels.cpu.linear_int8 import int8_block, pack_int8, quantize_weight
from ringserve.kernels.cpu.quantize import GROUP, SCALE_WORDS, input_factors, quantize_rows
from ringserve.kernels.cpu.row_sampler import CpuRowSampler
from ringserve.kernels.row_sampler import Draw, NumpyRowSampler, RowSampler

SHAPES = {"qkv": (960, 576), "output": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (49152, 576)}
"""(outputs, inputs)."""
ROWS = (1, 2, 4, 8, 16, 32, 256)
POOL_BYTES = 160 << 20
"""Weights in all of a layer's repetitions."""
VOCAB = 49152
SAMPLING = {
    "temperature": (1.0, 0, 1.0, 0.0),
    "top-k 50": (0.8, 50, 1.0, 0.0),
    "top-k 50, top-p 0.9": (0.8, 50, 0.9, 0.0),
    "top-p 0.95": (0.8, 0, 0.95, 0.0),
    "min-p 0.05": (1.0, 0, 1.0, 0.05),
}

Layer = Callable[[int, int], None]
"""(rows, which of the repetitions)."""


def main() -> int:
    """Measure, print, and write the result."""
    parser = module_parser(__file__, __doc__)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument("--rounds", type=at_least_one, default=5, help="default: 5")
    parser.add_argument("--rows", type=at_least_one, nargs="+", default=list(ROWS), help="rows of the inputs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    level, load = host_level(), OtherLoad()
    start = time.process_time()
    linears = [
        entry
        for name, shape in SHAPES.items()
        for entry in _measure_shape(name, shape, options.rows, options.rounds, level)
    ]
    result = {
        "command": " ".join(["python -P -m ringserve.bench.cpu_linear", *sys.argv[1:]]),
        "machine": describe(),
        "level": level_name(level),
        "linear": linears,
        "sampling_ms_per_row": _measure_sampling(options.rounds),
        "other_cores": round(load.cores(time.process_time() - start), 2),
    }
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _measure_shape(
    name: str, shape: tuple[int, int], rows: list[int], rounds: int, level: Level
) -> list[dict[str, Any]]:
    n, k = shape
    weight = (np.random.default_rng(0).standard_normal((n, k)) * 0.05).astype(np.float32)
    columns = {
        "bf16": _bf16(weight, max(rows), level),
        "int8": _int8(weight, max(rows), level),
        "onednn bf16": _onednn(weight, max(rows)),
        "read": _reader(),
    }
    entries = []
    for m in rows:
        best = dict.fromkeys(columns, float("inf"))
        for _ in range(rounds):
            for column, (repetitions, _, layer) in columns.items():
                start = time.thread_time()
                for i in range(repetitions):
                    layer(m, i)
                best[column] = min(best[column], (time.thread_time() - start) / repetitions)
        entry: dict[str, Any] = {"layer": name, "outputs": n, "inputs": k, "rows": m}
        for column, (_, size, _) in columns.items():
            entry[column] = {"GB/s": round(size / best[column] / 1e9, 1)}
            if column != "read":
                entry[column]["G/s"] = round(2 * m * n * k / best[column] / 1e9, 1)
        entries.append(entry)
        figures = "   ".join(
            f"{column} {entry[column].get('G/s', ''):>6} G/s {entry[column]['GB/s']:>5} GB/s" for column in columns
        )
        print(f"{name:8} rows {m:4}   {figures}", flush=True)
    return entries


def _bf16(weight: Any, rows: int, level: Level) -> tuple[int, int, Layer]:
    n, k = weight.shape
    packed = pack_bf16(to_bf16(weight))
    pool = _pool(packed)
    addresses = [entry.ctypes.data for entry in pool]
    x, out = aligned_zeros((rows, k), np.uint16), aligned_zeros((rows, padded(n)), np.float32)
    x[:] = to_bf16(np.random.default_rng(1).standard_normal((rows, k)).astype(np.float32))
    bias = aligned_zeros((padded(n),), np.float32)
    fixed = (bias.ctypes.data, x.ctypes.data, k, k, out.ctypes.data, padded(n))
    kept = (pool, x, out, bias)

    def layer(m: int, i: int) -> None:
        assert kept
        bf16_block(level, addresses[i], *fixed, m, n, 0, len(packed), 0)

    return len(pool), packed.nbytes, layer


def _int8(weight: Any, rows: int, level: Level) -> tuple[int, int, Layer]:
    n, k = weight.shape
    factors = input_factors(weight)
    packed, scales = pack_int8(*quantize_weight(weight, factors))
    pool, scale_pool = _pool(packed), _pool(scales, POOL_BYTES // packed.nbytes)
    addresses = [(entry.ctypes.data, other.ctypes.data) for entry, other in zip(pool, scale_pool, strict=True)]
    bias = aligned_zeros((padded(n),), np.float32)
    x = np.random.default_rng(1).standard_normal((rows, k)).astype(np.float32)
    q, steps = aligned_zeros((rows, k), np.int8), np.empty((rows, k // GROUP * SCALE_WORDS), np.uint32)
    quantize_rows(x.ctypes.data, rows, k, k, factors.ctypes.data, q.ctypes.data, steps.ctypes.data)
    out = aligned_zeros((rows, padded(n)), np.float32)
    fixed = (bias.ctypes.data, q.ctypes.data, k, steps.ctypes.data, steps.shape[1], k)
    target = (out.ctypes.data, padded(n))
    kept = (pool, scale_pool, bias, q, steps, out)

    def layer(m: int, i: int) -> None:
        assert kept
        int8_block(level, *addresses[i], *fixed, *target, m, n, 0, len(packed), 0)

    return len(pool), packed.nbytes, layer


def _onednn(weight: Any, rows: int) -> tuple[int, int, Layer]:
    operators: Any = torch.ops.mkldnn
    plain = torch.from_numpy(weight).bfloat16()
    size = 2 * plain.numel()
    pool = [operators._reorder_linear_weight(plain, 8) for _ in range(max(1, POOL_BYTES // size))]
    inputs = {m: torch.randn(m, weight.shape[1], dtype=torch.bfloat16) for m in range(1, rows + 1)}

    def layer(m: int, i: int) -> None:
        operators._linear_pointwise(inputs[m], pool[i], None, "none", [], "")

    return len(pool), size, layer


def _reader() -> tuple[int, int, Layer]:
    pool: np.ndarray[Any, np.dtype[np.int64]] = aligned_zeros((POOL_BYTES // 8,), np.int64)
    pool[:] = 1

    def layer(m: int, i: int) -> None:
        pool.max()

    return 1, POOL_BYTES, layer


def _pool(array: Any, count: int = 0) -> Any:
    pool = aligned_zeros((max(1, count or POOL_BYTES // array.nbytes), *array.shape), array.dtype)
    pool[:] = array
    return pool


def _measure_sampling(rounds: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    # A few likely tokens above a background, as a model's logits have them.
    rows = (rng.standard_normal((32, VOCAB)) * 1.5).astype(np.float32)
    rows[np.arange(32)[:, None], rng.integers(0, VOCAB, (32, 60))] += rng.random((32, 60), dtype=np.float32) * 12
    samplers: dict[str, RowSampler] = {"compiled": CpuRowSampler(VOCAB), "numpy": NumpyRowSampler()}
    found: dict[str, Any] = {"argmax": {"numpy": _best(lambda: rows.argmax(axis=1), rounds) / 32}}
    for name, (temperature, top_k, top_p, min_p) in SAMPLING.items():
        draws = [Draw(row, temperature, top_k, top_p, min_p, (i, 0, 0, 0), (7, 7)) for i, row in enumerate(rows)]
        found[name] = {
            kind: _best(lambda sampler=sampler, draws=draws: sampler.draw(draws), rounds) / 32  # type: ignore[misc]
            for kind, sampler in samplers.items()
        }
    for name, figures in found.items():
        print(f"{name:22}" + "   ".join(f"{kind} {value:.4f} ms a row" for kind, value in figures.items()), flush=True)
    return {name: {kind: round(value, 4) for kind, value in figures.items()} for name, figures in found.items()}


def _best(function: Callable[[], object], rounds: int) -> float:
    """Milliseconds."""
    best = float("inf")
    for _ in range(rounds + 1):
        start = time.thread_time()
        function()
        best = min(best, time.thread_time() - start)
    return 1000 * best


if __name__ == "__main__":
    run_module(main)
