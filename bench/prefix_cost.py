"""What the prefix cache costs where nothing hits: its share of a step's CPU time, on the default model.

    python -P -m ringserve.bench.prefix_cost --output bench/results/prefix-cost.json

Scheduler and executor run in this one thread, without rings; every prompt is new. Thread CPU time is counted around
each call into the prefix cache and around everything.
"""

from __future__ import annotations

import json
import random
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from ringserve.actor import ActorContext
from ringserve.bench.machine import describe
from ringserve.bench.module_command import at_least_one, module_parser, run_module
from ringserve.bench.scheduler_cost import clock_cost
from ringserve.config import ExecutorConfig, ExecutorSettings
from ringserve.engine.executor import Executor
from ringserve.engine.prefix_sharing import PrefixSharing
from ringserve.engine.scheduler import Scheduler
from ringserve.messages.columns import pack_i32
from ringserve.messages.requests import TokenizedRequest
from ringserve.messages.sampling import SamplingParams
from ringserve.messages.startup import ExecutorReady
from ringserve.messages.steps import ModelRunnerOutput
from ringserve.model_source import resolve_model

P = ParamSpec("P")
R = TypeVar("R")


class Counter:
    """Thread CPU seconds spent in the functions that were wrapped, calls within calls counted once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0
        self._clock = clock_cost()
        self._inside = False

    def wrap(self, function: Callable[P, R]) -> Callable[P, R]:
        """``function``, counted."""

        def counted(*arguments: P.args, **named: P.kwargs) -> R:
            if self._inside:
                return function(*arguments, **named)
            self._inside = True
            began = time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds += time.thread_time() - began - self._clock
                self.calls += 1
                self._inside = False

        return counted


class Outbox:
    """A ring that is a list."""

    def __init__(self) -> None:
        self.messages: deque[Any] = deque()

    def send(self, message: Any) -> None:
        """Keep it."""
        self.messages.append(message)


def measure(sequences: int, prompt_tokens: int, output_tokens: int, rounds: int) -> dict[str, Any]:
    """Run the load; shares and sums."""
    counter = Counter()
    for name in ("lookup", "start", "register", "leave"):
        setattr(PrefixSharing, name, counter.wrap(getattr(PrefixSharing, name)))
    results = Outbox()
    settings = ExecutorSettings(
        source=resolve_model(None, None, None),
        dtype="auto",
        max_model_len=None,
        max_num_seqs=sequences,
        max_num_batched_tokens=None,
        config=ExecutorConfig(threads=1),
    )
    executor = Executor(ActorContext("executor", settings, {"scheduler": results}, lambda _: None, lambda: None))
    executor.startup()
    ready = next(message for message in results.messages if isinstance(message, ExecutorReady))
    results.messages.clear()
    torch.set_num_threads(1)
    scheduler = Scheduler(ready)
    rng = random.Random(5)
    counter.seconds, counter.calls, steps = 0.0, 0, 0
    began = time.thread_time()
    for number in range(rounds * sequences):
        prompt = pack_i32([rng.randrange(1000, 40000) for _ in range(prompt_tokens)])
        sampling = SamplingParams(seed=number, temperature=0.0, ignore_eos=True)
        scheduler.add_request(TokenizedRequest(number, prompt, sampling, 1, output_tokens), time.monotonic_ns())
    while scheduler.has_work:
        while (step := scheduler.schedule(time.monotonic_ns())) is not None:
            executor.handle(step, "scheduler")
        executor.act()
        while results.messages:
            message = results.messages.popleft()
            if isinstance(message, ModelRunnerOutput):
                scheduler.update_from_output(message, time.monotonic_ns())
                steps += 1
    total = time.thread_time() - began
    executor.shutdown()
    if scheduler.stats().num_prefix_hits:
        raise AssertionError("something hit")
    return {
        "sequences": sequences,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "steps": steps,
        "cpu_ms_per_step": round(total / steps * 1e3, 3),
        "prefix_cache_us_per_step": round(counter.seconds / steps * 1e6, 2),
        "share": round(counter.seconds / total, 6),
    }


def main() -> int:
    """Measure, print, keep."""
    parser = module_parser(__file__, __doc__)
    parser.add_argument("--sequences", type=at_least_one, default=8)
    parser.add_argument("--prompt-tokens", type=at_least_one, default=256)
    parser.add_argument("--output-tokens", type=at_least_one, default=64)
    parser.add_argument("--rounds", type=at_least_one, default=2)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found = measure(options.sequences, options.prompt_tokens, options.output_tokens, options.rounds)
    print(json.dumps(found))
    if options.output is not None:
        options.output.write_text(json.dumps({**found, "machine": describe()}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    run_module(main)
