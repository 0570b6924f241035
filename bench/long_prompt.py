"""A long prompt among streams: what it does to their inter-token latency, and they to its time to first token.

    python -P -m ringserve.bench.long_prompt --output bench/results/long-prompt.json

Eight streams decode on the default model; a prompt of 8,000 tokens joins them. Three servers, one after the other: the
default token budget, a large fixed one, and an adaptive one (``--target-itl-ms``, set from what the streams have
without the prompt). In each the streams run alone, the prompt runs alone, and both run together, every round with new
prompts. Counted are the streams' gaps between tokens from the prompt's arrival to its first token (without it: over as
many seconds as asked for), and the prompt's TTFT.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import uvloop

from ringserve.bench.machine import OtherLoad, describe, tree_seconds
from ringserve.bench.metrics import percentile
from ringserve.bench.module_command import at_least_one, module_parser, positive, run_module
from ringserve.bench.server import BenchServer

SETTLE = 3.0
"""Seconds after which all streams decode."""
TARGET = 1.25
"""The adaptive server's target, over the 99th percentile of the streams alone."""
CASES = ("default", "large", "adaptive")


@dataclass
class Case:
    """One server's measurements."""

    flags: list[str]
    base_p50_ms: list[float] = field(default_factory=list)
    base_p99_ms: list[float] = field(default_factory=list)
    with_prompt_p50_ms: list[float] = field(default_factory=list)
    with_prompt_p99_ms: list[float] = field(default_factory=list)
    with_prompt_max_ms: list[float] = field(default_factory=list)
    ttft_alone_s: list[float] = field(default_factory=list)
    ttft_among_streams_s: list[float] = field(default_factory=list)
    other_cores: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Medians over the rounds, and the two ratios that matter."""
        median = statistics.median
        return {
            "flags": self.flags,
            "p99_itl_ratio": round(median(self.with_prompt_p99_ms) / median(self.base_p99_ms), 2),
            "ttft_ratio": round(median(self.ttft_among_streams_s) / median(self.ttft_alone_s), 2),
            **{
                name: [round(value, 3) for value in values]
                for name, values in vars(self).items()
                if isinstance(values, list) and name != "flags"
            },
        }


class Load:
    """Streams and prompts against one server."""

    def __init__(self, server: BenchServer, client: httpx.AsyncClient, rng: random.Random, streams: int) -> None:
        self._server = server
        self._client = client
        self._rng = rng
        self._streams = streams

    async def streams(self, seconds: float | None, prompt_tokens: int | None) -> tuple[list[float], float]:
        """(gaps in seconds, TTFT of a prompt that joins once all streams have settled)."""
        stop = asyncio.Event()
        tasks = [asyncio.ensure_future(self._stream(stop)) for _ in range(self._streams)]
        await asyncio.sleep(SETTLE)
        began = time.perf_counter()
        ttft = 0.0
        if prompt_tokens is not None:
            ttft = await self.prompt(prompt_tokens)
        elif seconds is not None:
            await asyncio.sleep(seconds)
        ended = time.perf_counter()
        stop.set()
        gaps = []
        for times in await asyncio.gather(*tasks):
            gaps += [later - earlier for earlier, later in pairwise(times) if later > began and earlier < ended]
        return gaps, ttft

    async def prompt(self, num_tokens: int) -> float:
        """TTFT of a prompt, in seconds."""
        began = time.perf_counter()
        async for _ in self._chunks(num_tokens, 1):
            return time.perf_counter() - began
        raise RuntimeError("the prompt got no token")

    async def _stream(self, stop: asyncio.Event) -> list[float]:
        times = []
        async for _ in self._chunks(32, 4000):
            times.append(time.perf_counter())
            if stop.is_set():
                break
        return times

    async def _chunks(self, num_tokens: int, max_tokens: int) -> Any:
        body = {
            "model": self._server.model,
            "prompt": [self._rng.randrange(1000, 40000) for _ in range(num_tokens)],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        async with self._client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"HTTP {answer.status_code}: {(await answer.aread())[:300].decode()}")
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    yield line


async def measure(case: Case, server: BenchServer, options: argparse.Namespace) -> None:
    """All rounds of one server."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, timeout=600.0, limits=limits, trust_env=False) as client:
        load = Load(server, client, random.Random(7), options.streams)
        await load.prompt(options.prompt_tokens // 4)  # warm, and a few steps for the step-time model
        await load.streams(2.0, None)
        for _ in range(options.rounds):
            others, own = OtherLoad(), time.process_time() + tree_seconds(server.pids())
            gaps, _ = await load.streams(options.seconds, None)
            case.base_p50_ms.append(percentile(gaps, 0.5) * 1e3)
            case.base_p99_ms.append(percentile(gaps, 0.99) * 1e3)
            case.ttft_alone_s.append(await load.prompt(options.prompt_tokens))
            gaps, ttft = await load.streams(None, options.prompt_tokens)
            case.with_prompt_p50_ms.append(percentile(gaps, 0.5) * 1e3)
            case.with_prompt_p99_ms.append(percentile(gaps, 0.99) * 1e3)
            case.with_prompt_max_ms.append(max(gaps) * 1e3)
            case.ttft_among_streams_s.append(ttft)
            case.other_cores.append(others.cores(time.process_time() + tree_seconds(server.pids()) - own))


def main() -> int:
    """Measure, print, keep."""
    parser = module_parser(__file__, __doc__)
    parser.add_argument("--streams", type=at_least_one, default=8)
    parser.add_argument("--prompt-tokens", type=at_least_one, default=8000)
    parser.add_argument("--seconds", type=positive, default=15.0, help="of the streams without the prompt")
    parser.add_argument("--rounds", type=at_least_one, default=3)
    parser.add_argument("--large-budget", type=at_least_one, default=2048)
    parser.add_argument("--target-itl-ms", type=positive, help=f"default: {TARGET} times the streams' p99 alone")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, help="default: all")
    parser.add_argument("--threads", type=at_least_one)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if "adaptive" in options.cases and "default" not in options.cases and options.target_itl_ms is None:
        parser.error("the adaptive case needs --target-itl-ms where the default one is not measured")

    common = [] if options.threads is None else ["--threads", str(options.threads)]
    cases: dict[str, Case] = {}

    def run(name: str, *flags: str) -> Case:
        case = cases[name] = Case([*common, *flags])
        with BenchServer(*case.flags) as server:
            uvloop.run(measure(case, server, options))
        print(name, json.dumps(case.summary()), flush=True)
        return case

    target: float | None = options.target_itl_ms
    if "default" in options.cases:
        default = run("default budget")
        target = target or round(TARGET * statistics.median(default.base_p99_ms), 1)
    if "large" in options.cases:
        run("large fixed budget", "--max-num-batched-tokens", str(options.large_budget))
    if "adaptive" in options.cases:
        run("adaptive budget", "--target-itl-ms", str(target))
    result = {
        "command": " ".join(["python -P -m ringserve.bench.long_prompt", *sys.argv[1:]]),
        "machine": describe(),
        "target_itl_ms": target,
        "cases": {name: case.summary() for name, case in cases.items()},
    }
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    run_module(main)
