"""What a huge prompt does to the streams beside it: their largest gap between tokens, with and without it.

    python -P -m ringserve.bench.stall --output bench/results/stall.json

Eight streams decode on the default model. Beside them come, one run each: nothing; a megabyte of text that is encoded
(/tokenize); a megabyte as a prompt; ten megabytes as a prompt, refused without being encoded.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import uvloop

from ringserve.bench.decode import ask_all
from ringserve.bench.machine import describe
from ringserve.bench.metrics import inter_token_latencies
from ringserve.bench.module_command import at_least_one, module_parser, run_module
from ringserve.bench.server import BenchServer

STREAMS = 8
MEGABYTE = 1_000_000
SETTLE = 2.0
"""Seconds after which all streams decode."""


def main() -> int:
    """Measure, print, and keep the result."""
    parser = module_parser(__file__, __doc__)
    parser.add_argument("--output-tokens", type=at_least_one, default=600)
    parser.add_argument("--rounds", type=at_least_one, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    cases: dict[str, Callable[[httpx.AsyncClient, str], Awaitable[httpx.Response]] | None] = {
        "nothing": None,
        "tokenize_1MB": lambda client, _model: client.post("/tokenize", json={"prompt": text(MEGABYTE)}),
        "prompt_1MB": lambda client, model: post_prompt(client, model, MEGABYTE),
        "prompt_10MB": lambda client, model: post_prompt(client, model, 10 * MEGABYTE),
    }
    gaps: dict[str, list[float]] = {name: [] for name in cases}
    steps: list[float] = []
    answers: dict[str, list[tuple[int, float]]] = {name: [] for name in cases}
    with BenchServer() as server:
        uvloop.run(ask_all(server, prompts(99), 8))
        for round_number in range(options.rounds):
            for name, disturb in cases.items():
                worst, typical, answer = uvloop.run(
                    one_run(server, prompts(round_number), options.output_tokens, disturb)
                )
                gaps[name].append(worst)
                steps.append(typical)
                if answer is not None:
                    answers[name].append(answer)
    step = statistics.median(steps)
    result = {
        "command": " ".join(["python -P -m ringserve.bench.stall", *sys.argv[1:]]),
        "machine": describe(),
        "step_ms": round(step * 1e3, 1),
        "largest_gap_ms": {name: [round(gap * 1e3, 1) for gap in values] for name, values in gaps.items()},
        "largest_gap_beyond_a_step_ms": {
            name: round((statistics.median(values) - step) * 1e3, 1) for name, values in gaps.items()
        },
        "answers": {
            name: [{"status": status, "seconds": round(seconds, 3)} for status, seconds in seen]
            for name, seen in answers.items()
            if seen
        },
    }
    output = json.dumps(result, indent=2)
    print(output)
    if options.output:
        options.output.write_text(output + "\n")
    return 0


async def one_run(
    server: BenchServer,
    ids: list[list[int]],
    output_tokens: int,
    disturb: Callable[[httpx.AsyncClient, str], Awaitable[httpx.Response]] | None,
) -> tuple[float, float, tuple[int, float] | None]:
    """(largest gap after the streams have settled, median gap, (status, seconds) of the disturbance)."""
    answer = None
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        started = time.perf_counter()
        streams = asyncio.ensure_future(ask_all(server, ids, output_tokens))
        await asyncio.sleep(SETTLE)
        if disturb is not None:
            sent = time.perf_counter()
            response = await disturb(client, server.model)
            answer = (response.status_code, time.perf_counter() - sent)
        records = await streams
    worst, typical = 0.0, []
    for record in records:
        for arrival, gap in zip(record.chunk_times[1:], inter_token_latencies(record), strict=True):
            if arrival - gap > started + SETTLE:
                worst = max(worst, gap)
                typical.append(gap)
    if not typical:
        raise SystemExit(f"the streams ended within {SETTLE:g} s; give them more tokens: --output-tokens")
    return worst, statistics.median(typical), answer


def prompts(seed: int) -> list[list[int]]:
    """Short prompts, different in each round."""
    return [[1000 + (7919 * (seed * STREAMS + n) + 31 * k) % 30000 for k in range(16)] for n in range(STREAMS)]


def text(size: int) -> str:
    """English-looking text of ``size`` characters."""
    return ("the quick brown ring carries words over shared memory " * (size // 54 + 1))[:size]


async def post_prompt(client: httpx.AsyncClient, model: str, size: int) -> httpx.Response:
    """A completion that cannot fit."""
    return await client.post("/v1/completions", json={"model": model, "prompt": text(size), "max_tokens": 1})


if __name__ == "__main__":
    run_module(main)
