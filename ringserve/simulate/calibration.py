"""Fits step times to a running server by a short load whose steps are known.

Decoding: so many requests at once; while all of them decode, the tokens of each come one step apart. Prompts: one
request alone, whose first token comes after the steps that its chunks take. The client's clock is used throughout, so
that what it costs to hand tokens on is in the step's time. The size of the server's engine is read from ``/metrics``.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime

import uvloop
from prometheus_client.parser import text_string_to_metric_families

from ringserve.bench.bodies import BodyBuilder
from ringserve.bench.http_client import Endpoint, HttpClient
from ringserve.bench.load import ClosedLoop, LoadGenerator
from ringserve.bench.machine import describe
from ringserve.bench.measure import ServerUnusable, find_model
from ringserve.bench.prompts import Job, TokenIds, Turn
from ringserve.bench.records import RequestRecord
from ringserve.bench.stream import http_failure
from ringserve.engine.step_time import StepShape
from ringserve.simulate.step_time import Calibration, Engine, Fit, Sample, fit

WINDOW = 24
"""Steps in which all sequences of a decoding sample are to overlap."""
FEWEST_STEPS = 4
PASSES = 2
"""Everything is measured so often, forwards and backwards: a machine that slows down meanwhile tilts nothing."""
SHORT = 16
LONG = 768
"""Prompt lengths of the decoding samples."""
MOST_SEQUENCES = 64
MOST_PROMPT_TOKENS = 8192
"""In one decoding sample: it must not take minutes."""

Report = Callable[[str, float], None]
"""(what is measured, part done)"""


@dataclass(frozen=True)
class DecodeProbe:
    """So many sequences with prompts of one length, decoding at once."""

    sequences: int
    prompt_tokens: int

    def __str__(self) -> str:
        return f"{self.sequences} sequences behind {self.prompt_tokens} tokens"


@dataclass(frozen=True)
class PromptProbe:
    """A prompt alone."""

    prompt_tokens: int

    def __str__(self) -> str:
        return f"a prompt of {self.prompt_tokens} tokens"


def calibrate(endpoint: Endpoint, ids: TokenIds, timeout: float, report: Report) -> tuple[Calibration, Fit]:
    """Send the load, fit.

    Raises:
        ServerUnusable: not a ringserve, or it did not answer as it should.
    """
    model = find_model(endpoint, timeout=10.0)
    return uvloop.run(_calibrate(endpoint, model, ids, timeout, report))


async def _calibrate(
    endpoint: Endpoint, model: str, ids: TokenIds, timeout: float, report: Report
) -> tuple[Calibration, Fit]:
    client = HttpClient(endpoint)
    try:
        engine = read_engine(await _metrics(client))
        prober = _Prober(client, model, engine, ids, timeout)
        once = list(plan(engine))
        probes = [probe for number in range(PASSES) for probe in (once if number % 2 == 0 else reversed(once))]
        await prober.ask(DecodeProbe(1, SHORT), 4)  # warm-up
        samples: list[Sample] = []
        for index, probe in enumerate(probes):
            report(str(probe), index / len(probes))
            samples.append(await prober.measure(probe))
        report("", 1.0)
    finally:
        client.close()
    knots = {sample.shapes[0].num_tokens for sample in samples} | {1}
    found = fit(samples, sorted(knots))
    about = {"url": endpoint.url, "model": model, "measured": datetime.now().astimezone().isoformat("T", "seconds")}
    about |= {name: str(value) for name, value in describe().items()}
    return Calibration(found.step_time, found.request_overhead_s, engine, about, tuple(samples)), found


def plan(engine: Engine) -> Iterator[DecodeProbe | PromptProbe]:
    """What is measured: 1, 2, 4 ... sequences, some with a long context, and prompts of one chunk and of several."""
    room = engine.max_model_len - 8 * WINDOW
    short, long = min(SHORT, max(1, room // 8)), min(LONG, room // 2)
    sizes = [2**power for power in range(MOST_SEQUENCES.bit_length()) if 2**power < engine.max_num_seqs]
    sizes = [size for size in sizes if size <= MOST_SEQUENCES] + [min(engine.max_num_seqs, MOST_SEQUENCES)]
    for size in dict.fromkeys(sizes):
        if size * (short + 4 * WINDOW) <= engine.num_pages * engine.page_size:
            yield DecodeProbe(size, short)
    for size in (1, 4, 8):
        tokens = size * (long + 4 * WINDOW)
        if size <= engine.max_num_seqs and tokens <= min(engine.num_pages * engine.page_size, MOST_PROMPT_TOKENS):
            yield DecodeProbe(size, long)
    budget = engine.max_num_batched_tokens
    lengths = [2**power for power in range(1, budget.bit_length()) if 2**power < budget]
    lengths += [budget, 2 * budget, 4 * budget]
    for length in lengths:
        if length <= min(room, engine.num_pages * engine.page_size - 1):
            yield PromptProbe(length)


class _Prober:
    def __init__(self, client: HttpClient, model: str, engine: Engine, ids: TokenIds, timeout: float) -> None:
        # The count in every chunk: a token whose text is not complete yet has no chunk of its own.
        counted = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        parameters = {"temperature": 0, "ignore_eos": True, **counted}
        self._client = client
        self._builder = BodyBuilder("completions", model, parameters=parameters)
        self._engine = engine
        self._ids = ids
        self._timeout = timeout
        self._rng = random.Random()  # not seeded: a second calibration must not find the first one's prompts cached

    async def measure(self, probe: DecodeProbe | PromptProbe) -> Sample:
        budget = self._engine.max_num_batched_tokens
        if isinstance(probe, DecodeProbe):
            prefill = -(-probe.sequences * probe.prompt_tokens // budget)
            records = await self.ask(probe, min(prefill + WINDOW + 4, self._room(probe.prompt_tokens)))
            return decode_sample(probe, records)
        (record,) = await self.ask(DecodeProbe(1, probe.prompt_tokens), 1)
        shapes = tuple(
            StepShape.of([(start, min(budget, probe.prompt_tokens - start))])
            for start in range(0, probe.prompt_tokens, budget)
        )
        return Sample(shapes, record.chunk_times[0] - record.sent, with_overhead=True)

    def _room(self, prompt_tokens: int) -> int:
        return self._engine.max_model_len - prompt_tokens

    async def ask(self, probe: DecodeProbe, output_tokens: int) -> list[RequestRecord]:
        """All at once, each with a prompt of its own; raises ServerUnusable for the first failure."""
        generator = LoadGenerator(self._client, self._builder, timeout=self._timeout)
        prompts = [self._ids.draw(self._rng, probe.prompt_tokens) for _ in range(probe.sequences)]
        jobs = [generator.prepare(Job((Turn(prompt, output_tokens),))) for prompt in prompts]
        await generator.run(iter(jobs), ClosedLoop(len(jobs)))
        for record in generator.records:
            if record.failure is not None:
                raise ServerUnusable(f"calibration, {probe}: {record.failure.kind}: {record.failure.message}")
        return generator.records


def decode_sample(probe: DecodeProbe, records: list[RequestRecord]) -> Sample:
    """The mean step while all streams decode.

    Raises:
        ServerUnusable: they did not overlap.
    """
    begin = max(record.chunk_times[0] for record in records)
    end = min(record.chunk_times[-1] for record in records)
    steps, contexts = [], []
    for record in records:
        counts = record.chunk_tokens or [1] * len(record.chunk_times)
        tokens_before, inside = 0, list[tuple[float, int]]()
        for time, count in zip(record.chunk_times, counts, strict=True):
            tokens_before += count if time < begin else 0
            if begin <= time <= end:
                inside.append((time, count))
        tokens = sum(count for _, count in inside[1:])
        if tokens < FEWEST_STEPS:
            raise ServerUnusable(f"calibration, {probe}: the answers did not overlap; is the server busy with others?")
        steps.append((inside[-1][0] - inside[0][0]) / tokens)
        contexts.append(probe.prompt_tokens + tokens_before + (tokens + 1) / 2)
    size = len(records)
    return Sample((StepShape(size, size, 0, round(sum(contexts)), 0),), statistics.fmean(steps), with_overhead=False)


async def _metrics(client: HttpClient) -> str:
    exchange = await client.get("/metrics", 10.0)
    failure = exchange.failure or (None if exchange.status == 200 else http_failure(exchange.status, exchange.body()))
    if failure is not None:
        raise ServerUnusable(f"{client.endpoint.address}/metrics: {failure.kind.replace('_', ' ')}: {failure.message}")
    return exchange.body().decode(errors="replace")


def read_engine(metrics: str) -> Engine:
    """The sizes that a ringserve shows in its metrics.

    Raises:
        ServerUnusable: they are not there.
    """
    try:
        for family in text_string_to_metric_families(metrics):
            if family.name == "ringserve_engine_info":
                labels = family.samples[0].labels
                return Engine(**{name: int(labels[name]) for name in Engine.__struct_fields__})
    except (ValueError, KeyError, IndexError) as error:
        raise ServerUnusable(f"/metrics is not what a ringserve says: {error}") from None
    raise ServerUnusable("/metrics has no ringserve_engine_info: only a ringserve can be calibrated")
