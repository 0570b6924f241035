"""Decode throughput through HTTP with streaming against plain ``transformers.generate``, interleaved in one run.

    python -P -m ringserve.bench.decode --output bench/results/decode.json

Both sides compute the default model in the same dtype on the same number of threads, with the same prompts and forced
lengths, timed by this process's clock. Plain transformers keeps its KV cache, runs in inference mode, is warmed up, and
answers one request after the other; ringserve gets all of them at once. The side that does not run is idle: a server
without requests uses no CPU.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
import uvloop
from rich.console import Console
from rich.progress import Progress

from ringserve.bench.bodies import BodyBuilder
from ringserve.bench.hops import hop_sums, mean_microseconds
from ringserve.bench.http_client import Endpoint, HttpClient
from ringserve.bench.load import ClosedLoop, LoadGenerator
from ringserve.bench.machine import OtherLoad, describe, tree_seconds
from ringserve.bench.metrics import inter_token_latencies, percentile
from ringserve.bench.module_command import at_least_one, module_parser, run_module
from ringserve.bench.prompts import Job, Turn
from ringserve.bench.records import RequestRecord
from ringserve.bench.server import BenchServer
from ringserve.engine.gguf_weights import load_llama, open_gguf
from ringserve.model_source import resolve_model


def main() -> int:
    """Measure, print, and keep the result."""
    parser = module_parser(__file__, __doc__)
    parser.add_argument("--requests", type=at_least_one, default=8)
    parser.add_argument("--prompt-tokens", type=at_least_one, default=128)
    parser.add_argument("--output-tokens", type=at_least_one, default=64)
    parser.add_argument("--rounds", type=at_least_one, default=3)
    parser.add_argument("--threads", type=at_least_one, default=1)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()

    generator = torch.Generator().manual_seed(7)
    prompts = torch.randint(1000, 40000, (options.requests, options.prompt_tokens), generator=generator).tolist()
    console = Console(stderr=True)
    with (
        # The rounds repeat their prompts, which transformers computes anew each time.
        BenchServer(
            "--dtype", options.dtype, "--threads", str(options.threads), "--no-enable-prefix-caching"
        ) as server,
        Progress(console=console) as progress,
    ):
        task = progress.add_task("warming up", total=2 * options.rounds + 1)
        plain = PlainTransformers(options.dtype, options.threads)
        plain.answer(prompts[:1], 8)
        uvloop.run(ask_all(server, prompts, 8))
        progress.advance(task)
        plain_rates, served_rates, streams, hops, others = [], [], [], [], []
        for _ in range(options.rounds):
            progress.update(task, description="transformers generate")
            plain_rates.append(plain.answer(prompts, options.output_tokens))
            progress.advance(task)
            progress.update(task, description="ringserve")
            before, load, own = read_hops(server.url), OtherLoad(), time.process_time() + tree_seconds(server.pids())
            started = time.perf_counter()
            streams += uvloop.run(ask_all(server, prompts, options.output_tokens))
            served_rates.append(options.requests * options.output_tokens / (time.perf_counter() - started))
            others.append(load.cores(time.process_time() + tree_seconds(server.pids()) - own))
            hops.append(mean_microseconds(before, read_hops(server.url)))
            progress.advance(task)
    gaps = [gap for stream in streams for gap in inter_token_latencies(stream)]
    result = {
        "command": " ".join(["python -P -m ringserve.bench.decode", *sys.argv[1:]]),
        "machine": describe(),
        "load": {key: value for key, value in vars(options).items() if key != "output"},
        "transformers_tokens_per_s": plain_rates,
        "ringserve_tokens_per_s": served_rates,
        "medians": {
            "transformers": statistics.median(plain_rates),
            "ringserve": statistics.median(served_rates),
            "ratio": statistics.median(served_rates) / statistics.median(plain_rates),
        },
        "ttft_ms_p50": statistics.median(stream.chunk_times[0] - stream.sent for stream in streams) * 1e3,
        "itl_ms_p50": percentile(gaps, 0.5) * 1e3,
        "itl_ms_p99": percentile(gaps, 0.99) * 1e3,
        "hops_us_per_step": mean_of(hops),
        "other_processes_cores": others,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")
    if max(others) > 0.1:
        console.print(f"other processes used up to {max(others):.2f} cores: not a quiet machine")
    return 0


class PlainTransformers:
    """The default model with transformers' own attention and cache."""

    def __init__(self, dtype: str, threads: int) -> None:
        torch.set_num_threads(threads)
        source = resolve_model(None, None, None)
        file = open_gguf(Path(source.path))
        self._model: Any = load_llama(file, getattr(torch, dtype), "sdpa", lambda _fraction: None)

    def answer(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> float:
        """Generate for one prompt after the other; returns output tokens per second."""
        started = time.perf_counter()
        with torch.inference_mode():
            for prompt in prompts:
                ids = torch.tensor([list(prompt)])
                output: Any = self._model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=output_tokens,
                    min_new_tokens=output_tokens,
                    do_sample=False,
                    pad_token_id=0,
                )
                assert output.shape[1] == len(prompt) + output_tokens
        return len(prompts) * output_tokens / (time.perf_counter() - started)


async def ask_all(server: BenchServer, prompts: Sequence[Sequence[int]], output_tokens: int) -> list[RequestRecord]:
    """All prompts at once."""
    client = HttpClient(Endpoint.parse(server.url))
    builder = BodyBuilder("completions", server.model, parameters={"temperature": 0, "ignore_eos": True})
    generator = LoadGenerator(client, builder, timeout=600.0)
    jobs = [generator.prepare(Job((Turn(list(prompt), output_tokens),))) for prompt in prompts]
    await generator.run(iter(jobs), ClosedLoop(len(jobs)))
    client.close()
    for record in generator.records:
        assert record.failure is None, record.failure
        assert record.usage is not None
        assert record.usage.completion_tokens == output_tokens
    return generator.records


def read_hops(url: str) -> dict[str, tuple[float, float]]:
    """See ``hops.hop_sums``."""
    return hop_sums(httpx.get(f"{url}/metrics").text)


def mean_of(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Median over the rounds, hop by hop."""
    return {hop: round(statistics.median(r[hop] for r in rounds if hop in r), 1) for hop in rounds[0]}


if __name__ == "__main__":
    run_module(main)
