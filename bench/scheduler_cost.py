"""CPU time of the scheduler's two verbs, without processes and without a model.

    python -P -m ringserve.bench.scheduler_cost --output bench/results/scheduler-cost.json

A scheduler with as many running sequences as asked for decodes; its results are made up. Counted is thread CPU time, in
medians over the steps: ``schedule()`` with the encoding of its message, ``update_from_output()``, and the encoding of
what goes to the tokenizer. Three things are compared, taking turns so that the machine's moods fall on all:
short and long contexts (neither verb may grow with the context), every policy, and the prefix cache switched on (with
nothing to hit) and off.

The time of one reading of the clock is measured and taken off.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ringserve.bench.machine import describe
from ringserve.bench.module_command import at_least_one, module_parser, run_module
from ringserve.config import SchedulerConfig
from ringserve.engine.scheduler import Scheduler
from ringserve.engine.scheduler_outputs import pack_token_outputs
from ringserve.messages.columns import pack_i32, unpack_i32
from ringserve.messages.requests import TokenizedRequest
from ringserve.messages.sampling import SamplingDefaults, SamplingParams
from ringserve.messages.startup import ExecutorReady
from ringserve.messages.steps import ModelRunnerOutput, SchedulerOutput

POLICIES = ("fcfs", "priority", "deadline", "fair")
TURN = 25
"""Steps of one subject before it is another's turn."""
WARM = 3
"""Steps at the beginning of a turn that are not counted."""
_VOCABULARY = 49152


class Subject:
    """A scheduler full of sequences that decode."""

    def __init__(
        self, num_sequences: int, context: int, page_size: int, *, policy: str = "fcfs", prefix_caching: bool = True
    ) -> None:
        self._rng = random.Random(7)
        self._encode = msgspec.msgpack.Encoder().encode
        self.seconds: dict[str, list[float]] = {"schedule": [], "update": [], "outputs": []}
        longest = context + 65536
        ready = ExecutorReady(
            vocab_size=_VOCABULARY,
            max_model_len=longest,
            eos_token_ids=pack_i32([2]),
            num_pages=num_sequences * (-(-(context + 8192) // page_size) + 2),
            page_size=page_size,
            max_num_seqs=num_sequences,
            max_num_batched_tokens=max(2 * num_sequences, 8192),
            dtype="bfloat16",
            kv_dtype="bfloat16",
            device="cpu",
            architecture="None",
            defaults=SamplingDefaults(),
        )
        config = msgspec.convert(
            {"scheduling_policy": policy, "enable_prefix_caching": prefix_caching}, SchedulerConfig
        )
        self.scheduler = Scheduler(ready, config)
        self._in_flight: list[ModelRunnerOutput] = []
        self._clock_ns = 0
        for number in range(num_sequences):
            # Lengths differ by less than a page: each step has as many sequences that fill one.
            prompt = [self._rng.randrange(3, _VOCABULARY) for _ in range(context + number % page_size)]
            request = TokenizedRequest(
                request_id=number,
                prompt_token_ids=pack_i32(prompt),
                sampling=SamplingParams(seed=number, ignore_eos=True),
                n=1,
                max_tokens=65000,
                priority=number % 3,
                tenant=f"tenant {number % 4}",
            )
            if self.scheduler.add_request(request, number) is not None:
                raise AssertionError("a request of the benchmark was refused")
        while True:  # every prompt, and then some decode steps
            message = self.step(count=False)
            if len(message.slots) == 4 * num_sequences == 4 * sum(unpack_i32(message.num_tokens)):
                break
        for _ in range(20):
            self.step(count=False)

    def step(self, *, count: bool = True) -> SchedulerOutput:
        """Plan a step, and take the result of the one before."""
        self._clock_ns += 20_000_000
        began = time.thread_time()
        message = self.scheduler.schedule(self._clock_ns)
        self._encode(message)
        planned = time.thread_time()
        if message is None:
            raise AssertionError("nothing to schedule")
        self._in_flight.append(self._result(message))
        taken = updated = packed = 0.0
        if len(self._in_flight) == 2:
            output = self._in_flight.pop(0)
            taken = time.thread_time()
            result = self.scheduler.update_from_output(output, self._clock_ns)
            updated = time.thread_time()
            self._encode(pack_token_outputs(result.outputs, result.times, self.scheduler.stats(), self._clock_ns))
            packed = time.thread_time()
        if count:
            self.seconds["schedule"].append(planned - began)
            self.seconds["update"].append(updated - taken)
            self.seconds["outputs"].append(packed - updated)
        return message

    def _result(self, message: SchedulerOutput) -> ModelRunnerOutput:
        slots = unpack_i32(message.slots)
        return ModelRunnerOutput(
            step_id=message.step_id,
            slots=message.slots,
            token_ids=pack_i32([self._rng.randrange(3, _VOCABULARY) for _ in slots]),
            logprobs=None,
            prompt_logprobs=(),
            received_ns=self._clock_ns,
            started_ns=self._clock_ns,
            sent_ns=self._clock_ns + 19_000_000,
        )

    def medians(self, clock: float) -> dict[str, float]:
        """Microseconds."""
        return {
            name: round((statistics.median(values) - clock) * 1e6, 1) for name, values in self.seconds.items() if values
        }


def clock_cost() -> float:
    """Seconds between two readings of the thread's clock with nothing between them."""
    pairs = []
    for _ in range(2000):
        began = time.thread_time()
        pairs.append(time.thread_time() - began)
    return statistics.median(pairs)


def measure(subjects: dict[str, Subject], steps: int) -> dict[str, dict[str, float]]:
    """Medians of each, in turns of some steps: what one subject leaves in the processor's caches is another's loss."""
    gc.collect()
    gc.disable()
    for _ in range(-(-steps // TURN)):
        for subject in subjects.values():
            for _ in range(WARM):
                subject.step(count=False)
            for _ in range(TURN):
                subject.step()
    gc.enable()
    clock = clock_cost()
    return {name: subject.medians(clock) for name, subject in subjects.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, keep."""
    parser = module_parser(__file__, __doc__)
    parser.add_argument("--sequences", type=at_least_one, default=256)
    parser.add_argument("--contexts", type=at_least_one, nargs="+", default=[128, 1024, 4096])
    parser.add_argument("--page-size", type=at_least_one, default=16)
    parser.add_argument("--steps", type=at_least_one, default=300)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)

    sequences, page_size = options.sequences, options.page_size
    subjects = {f"context {n}": Subject(sequences, n, page_size) for n in options.contexts}
    shortest = min(options.contexts)
    subjects |= {name: Subject(sequences, shortest, page_size, policy=name) for name in POLICIES[1:]}
    subjects["without prefix cache"] = Subject(sequences, shortest, page_size, prefix_caching=False)
    found = measure(subjects, options.steps)
    first = found[f"context {shortest}"]
    without = found["without prefix cache"]
    result: dict[str, Any] = {
        "unit": "microseconds of thread CPU time, medians",
        "sequences": sequences,
        "page_size": page_size,
        "steps": options.steps,
        "medians": found,
        "prefix_cache_us_per_step": round(sum(first[verb] - without[verb] for verb in ("schedule", "update")), 1),
        "machine": describe(),
    }
    for name, medians in found.items():
        sys.stdout.write(f"{name:<22}" + "".join(f"{verb} {us:7.1f} us   " for verb, us in medians.items()) + "\n")
    sys.stdout.write(f"prefix cache, nothing hits: {result['prefix_cache_us_per_step']} us a step\n")
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    run_module(main)
