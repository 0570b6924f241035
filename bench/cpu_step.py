"""Where a step of the executor spends its time on a CPU, and what each part reaches of its roof.

    python -P -m ringserve.bench.cpu_step --output bench/results/cpu-step.json

The default model on the fast path decodes 1, 8 and 32 sequences at a context of 256 tokens, and computes a prompt. The
threads' own clock gives the time of each kind of operation; the rest of ``ModelRunner.execute`` is Python (but for the
preparation of the compiled call, which is scaled in with its operations). The roofs
(bytes a second from memory, operations a second) are measured in the same run, on as many threads: a part's roof is the
time that its bytes or its operations take at least, whichever is more.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from ringserve.bench.machine import describe
from ringserve.bench.module_command import at_least_one, at_least_zero, module_parser, run_module
from ringserve.bench.report import check_writable, write_json
from ringserve.engine.decoder_weights import Linear
from ringserve.engine.fast_decoder import FastDecoder
from ringserve.engine.fast_forward import FastForward
from ringserve.engine.fast_model import FastModel
from ringserve.engine.fast_startup import prepare_fast
from ringserve.engine.kv_layout import KVDType
from ringserve.engine.kv_pool import KVPool, bytes_per_page
from ringserve.engine.model_loader import load_model
from ringserve.engine.model_runner import ModelRunner
from ringserve.engine.sampler import Sampled, Sampler
from ringserve.engine.slot_table import SlotTable
from ringserve.kernels.cpu.features import host_level, level_name
from ringserve.kernels.cpu.roofs import bfloat16_rate, read_bandwidth
from ringserve.kernels.cpu.row_sampler import CpuRowSampler
from ringserve.messages.columns import pack_i32
from ringserve.messages.sampling import SamplingParams
from ringserve.messages.steps import NewSequence, SchedulerOutput
from ringserve.model_source import resolve_model

PAGE_SIZE = 64
PARTS = {
    "linear": "linears",
    "gate_up": "linears",
    "rotate": "attention",
    "attend": "attention",
    "merge": "attention",
    "embed": "norms",
    "norm": "norms",
    "pick": "norms",
    "quantise": "norms",
    "rescore": "output layer",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and keep the result."""
    parser = module_parser(__file__, __doc__)
    parser.add_argument("--model")
    parser.add_argument("--quantization", choices=("none", "int8"), default="none")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "int8"), default="auto")
    parser.add_argument("--threads", type=at_least_one, default=1)
    parser.add_argument("--context", type=at_least_one, default=256)
    parser.add_argument("--batch", type=at_least_one, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=at_least_zero, default=512, help="tokens of the prompt step; 0: none")
    parser.add_argument("--steps", type=at_least_one, default=20)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    check_writable(options.output, "--output")
    torch.set_num_threads(1)
    kv_dtype: KVDType = "int8" if options.kv_cache_dtype == "int8" else "bfloat16"
    bench = StepBench(
        options.model, options.quantization, kv_dtype, options.threads, max(options.batch), options.context
    )
    try:
        roofs = {
            "bytes_per_second": read_bandwidth(options.threads),
            "operations_per_second": bfloat16_rate(options.threads, host_level()) * (2 if bench.int8 else 1),
        }
        results = [bench.decode(batch, options.steps, roofs) for batch in options.batch]
        if options.prompt:
            results.append(bench.prompt(options.prompt, max(3, options.steps // 5), roofs))
    finally:
        bench.close()
    content = {
        "machine": describe(),
        "threads": options.threads,
        "instructions": level_name(host_level()),
        "quantization": options.quantization,
        "kv_dtype": kv_dtype,
        "context": options.context,
        "roofs": roofs,
        "steps": results,
    }
    _print(content)
    if options.output is not None:
        write_json(options.output, content)
    return 0


class _TimedSampler(Sampler):
    """Adds up what sampling takes."""

    seconds = 0.0

    def sample(self, slots: Sequence[int], logits: NDArray[np.float32], best: Sequence[int] | None = None) -> Sampled:
        started = time.perf_counter()
        sampled = super().sample(slots, logits, best)
        self.seconds += time.perf_counter() - started
        return sampled


class _TimedForward:
    """What the compiled walk takes, by kind of operation."""

    def __init__(self, decoder: FastDecoder) -> None:
        self._forward = FastForward(decoder)
        self._decoder = decoder
        self._elapsed = 0.0
        decoder.record_times()

    def forward(
        self, table: SlotTable, slots: NDArray[np.int32], counts: NDArray[np.int32], wanted: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        started = time.perf_counter()
        logits = self._forward.forward(table, slots, counts, wanted)
        self._elapsed = time.perf_counter() - started
        return logits

    def parts(self) -> dict[str, float]:
        """Seconds of the last step by kind of operation. Not asked for within a step: finding them takes as long as
        much of what is measured."""
        times = self._decoder.operation_times()
        # The clock's ticks are scaled by the call's time: preparing the step, some tens of microseconds, is part of it.
        total = sum(ticks for _, _, ticks in times)
        seconds: defaultdict[str, float] = defaultdict(float)
        output_layer = max(index for kind, index, _ in times if kind == "linear")
        for kind, index, ticks in times:
            part = "output layer" if index == output_layer else PARTS[kind]
            seconds[part] += ticks / total * self._elapsed
        return dict(seconds)

    def best_tokens(self) -> list[int] | None:
        return self._forward.best_tokens()

    def close(self) -> None:
        self._forward.close()


class StepBench:
    """The default model's executor, without its process."""

    def __init__(
        self, model: str | None, quantization: str, kv_dtype: KVDType, threads: int, max_batch: int, context: int
    ) -> None:
        source = resolve_model(model, None, None)
        loaded = load_model(source, "bfloat16", lambda stage, fraction: None)
        self.int8 = quantization == "int8"
        self._model: FastModel = prepare_fast(
            loaded,
            quantization,
            PAGE_SIZE,
            4096,
            1 << 40,
            lambda stage, fraction: None,
            kv_dtype=kv_dtype,
        )
        self._context = context
        self._pages_each = -(-(context + 512) // PAGE_SIZE)
        pool = KVPool(self._model.layers, (max_batch + 1) * self._pages_each, PAGE_SIZE, kv_dtype)
        self._kv_bytes = bytes_per_page(self._model.layers, PAGE_SIZE, kv_dtype) / PAGE_SIZE
        vocab_size = self._model.weights.shape.vocab_size
        self._sampler = _TimedSampler(vocab_size, (), max_batch + 1, CpuRowSampler(vocab_size))
        self._forward = _TimedForward(self._model.decoder(pool, threads, 512))
        self._runner = ModelRunner(self._forward, PAGE_SIZE, self._sampler)
        # Pages of a sequence lie anywhere, as after some time of serving.
        self._pages = np.random.default_rng(0).permutation(pool.num_pages) + 1

    def close(self) -> None:
        """End the threads."""
        self._runner.close()

    def decode(self, batch: int, steps: int, roofs: dict[str, float]) -> dict[str, Any]:
        """``steps`` steps of ``batch`` sequences."""
        for slot in range(batch):
            self._start(slot, self._context)
        slots, ones = pack_i32(range(batch)), pack_i32([1] * batch)
        step = SchedulerOutput(1, (), slots, ones, pack_i32([0] * batch), b"", b"")
        return self._measure(f"decode {batch}", step, steps, batch, batch, self._context * batch, roofs)

    def prompt(self, tokens: int, steps: int, roofs: dict[str, float]) -> dict[str, Any]:
        """A prompt of ``tokens`` in one step, anew each time."""
        step = self._prompt_step(0, tokens)
        seen = tokens * (tokens + 1) // 2
        return self._measure(f"prompt {tokens}", step, steps, tokens, 1, seen, roofs)

    def _prompt_step(self, slot: int, tokens: int) -> SchedulerOutput:
        ids = np.random.default_rng(slot).integers(3, self._model.weights.shape.vocab_size, tokens).tolist()
        pages = self._pages[slot * self._pages_each : (slot + 1) * self._pages_each].tolist()
        greedy = SamplingParams(seed=0, temperature=0.0, ignore_eos=True)
        new = NewSequence(slot, pack_i32(ids), tokens, 0, 0, greedy, 512)
        one = pack_i32([slot])
        return SchedulerOutput(1, (new,), one, pack_i32([tokens]), pack_i32([len(pages)]), pack_i32(pages), b"")

    def _start(self, slot: int, tokens: int) -> None:
        self._runner.execute(self._prompt_step(slot, tokens))

    def _measure(
        self,
        name: str,
        step: SchedulerOutput,
        steps: int,
        rows: int,
        logit_rows: int,
        seen: int,
        roofs: dict[str, float],
    ) -> dict[str, Any]:
        """``seen``: keys that the step's queries look at."""
        self._runner.execute(step)
        samples: list[dict[str, float]] = []
        for _ in range(steps):
            self._sampler.seconds = 0.0
            started = time.perf_counter()
            self._runner.execute(step)
            total = time.perf_counter() - started
            parts = self._forward.parts() | {"sampling": self._sampler.seconds}
            samples.append({"total": total, **parts, "python": total - sum(parts.values())})
        medians = {part: statistics.median(sample[part] for sample in samples) for part in samples[0]}
        least = self._least_seconds(rows, logit_rows, seen, roofs)
        return {
            "name": name,
            "tokens_per_second": rows / medians["total"],
            "milliseconds": {part: 1e3 * seconds for part, seconds in medians.items()},
            "share": {part: seconds / medians["total"] for part, seconds in medians.items() if part != "total"},
            "of_roof": {part: seconds / medians[part] for part, seconds in least.items()},
        }

    def _least_seconds(self, rows: int, logit_rows: int, seen: int, roofs: dict[str, float]) -> dict[str, float]:
        """What the parts would take at their roofs."""
        weights, shape = self._model.weights, self._model.weights.shape
        layers = [x for layer in weights.layers for x in (layer.qkv, layer.output, layer.gate_up, layer.down)]

        def linear(parts: Sequence[Linear], count: int) -> float:
            memory = sum(part.weight.nbytes for part in parts) / roofs["bytes_per_second"]
            return max(memory, sum(2 * count * part.n * part.k for part in parts) / roofs["operations_per_second"])

        # A prompt's queries look at keys that are at hand; a decode step reads them all.
        keys = seen if rows == logit_rows else rows
        memory = keys * self._kv_bytes / roofs["bytes_per_second"]
        rate = roofs["operations_per_second"] / (2 if self.int8 else 1)
        attention = max(memory, 4 * seen * shape.layers * shape.heads * shape.head_dim / rate)
        return {
            "linears": linear(layers, rows),
            "output layer": linear([weights.head], logit_rows),
            "attention": attention,
        }


def _print(content: dict[str, Any]) -> None:
    roofs = content["roofs"]
    console = Console()
    console.print(
        f"{content['threads']} thread(s), {content['instructions']}, quantization {content['quantization']}, keys and "
        f"values {content['kv_dtype']}; roofs: "
        f"{roofs['bytes_per_second'] / 1e9:.1f} GB/s, {roofs['operations_per_second'] / 1e9:.0f} G operations/s"
    )
    table = Table("step", "tokens/s", "ms", "linears", "output layer", "attention", "norms", "sampling", "Python")
    for step in content["steps"]:
        cells = []
        for part in ("linears", "output layer", "attention", "norms", "sampling", "python"):
            text = f"{step['milliseconds'].get(part, 0.0):.2f}"
            if part in step["of_roof"]:
                text += f" ({step['of_roof'][part]:.0%} of roof)"
            cells.append(text)
        table.add_row(step["name"], f"{step['tokens_per_second']:.0f}", f"{step['milliseconds']['total']:.2f}", *cells)
    console.print(table)


if __name__ == "__main__":
    run_module(main)
