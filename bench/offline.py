"""``ringserve bench offline``: the engine's throughput on a batch, and how much of it is left over HTTP.

Both sides get the same token ids and forced lengths, all requests at once. The offline side is ``ringserve.LLM``: the
same tokenizer, scheduler and executor processes with this process in the frontend's place. With ``--against-serving``
both engines stay up and take turns; the one that waits uses no CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import httpx
import msgspec
import uvloop
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from ringserve.bench.bodies import BodyBuilder
from ringserve.bench.http_client import HttpClient
from ringserve.bench.load import ClosedLoop, LoadGenerator
from ringserve.bench.machine import tree_seconds
from ringserve.bench.measure import ServerUnusable
from ringserve.bench.metrics import compute
from ringserve.bench.processes import machine_cpu_seconds
from ringserve.bench.prompts import Job, TokenIds, Turn
from ringserve.bench.records import RequestRecord
from ringserve.bench.report import check_writable, document, write_json
from ringserve.bench.server_command import CommandServer
from ringserve.bench.system_use import NOTEWORTHY_CORES
from ringserve.model_source import ModelNotFound
from ringserve.offline.errors import EngineError
from ringserve.offline.llm import LLM
from ringserve.offline.sampling_params import SamplingParams
from ringserve.options import OptionError

ENGINE_OPTIONS = ("dtype", "threads", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory")
WARMUP_TOKENS = 8
START_TIMEOUT = 600.0
REQUEST_TIMEOUT = 3600.0


class Side(msgspec.Struct, frozen=True):
    """One side's batch in one round."""

    seconds: float
    """First request sent to last token received."""
    output_tokens_per_s: float
    ttft_ms_p50: float
    """First token - sent. Offline all are sent at once, too."""
    tpot_ms_p50: float | None
    """(Last token - first token) / (tokens - 1); None for one token."""
    cpu_seconds: dict[str, float]
    """By process; ``client`` is this one: the load generator, or the offline engine's frontend."""
    hops_us: dict[str, float]
    """Serving only: mean time of a step's data on each way, in microseconds."""


class Round(msgspec.Struct, frozen=True):
    """One batch size in one round."""

    num_requests: int
    round: int
    offline: Side
    serving: Side | None
    other_cores: float
    """Used by other processes of this machine meanwhile."""


class Row(msgspec.Struct, frozen=True):
    """One batch size: medians over the rounds."""

    num_requests: int
    offline_tokens_per_s: float
    serving_tokens_per_s: float | None
    ratio: float | None
    """Median of the rounds' serving / offline."""
    ratio_low: float | None
    ratio_high: float | None
    ttft_ms_p50: dict[str, float]
    """By side."""
    tpot_ms_p50: dict[str, float]
    offline_cpu_ms_per_token: dict[str, float]
    serving_cpu_ms_per_token: dict[str, float]
    hops_us: dict[str, float]


@dataclass(frozen=True)
class Load:
    """What each batch asks for."""

    prompt_tokens: int
    output_tokens: int
    seed: int
    ids: TokenIds

    def prompts(self, name: str, count: int) -> list[list[int]]:
        """The same name gives the same prompts."""
        rng = Random(f"{self.seed} {name}")
        return [self.ids.draw(rng, self.prompt_tokens) for _ in range(count)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What it takes."""
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="as for `ringserve serve` (default: the embedded model)")
    add("--num-requests", default="8,32", metavar="N,N", help="sizes of the batches (default: %(default)s)")
    add("--prompt-tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    add("--output-tokens", type=int, default=64, metavar="N", help="default: %(default)s")
    add("--rounds", type=int, default=3, metavar="N", help="default: %(default)s")
    add("--seed", type=int, default=0, metavar="N", help="of the random prompts (default: %(default)s)")
    add(
        "--against-serving",
        action="store_true",
        help="also start a server, and send it the same batches over HTTP, streaming, in the same rounds",
    )
    engine = parser.add_argument_group("engine (both sides; defaults as for `ringserve serve`)")
    for name in ENGINE_OPTIONS:
        number = name not in ("dtype", "kv_cache_memory")
        engine.add_argument(f"--{name.replace('_', '-')}", type=int if number else str, metavar="N" if number else "X")
    parser.add_argument_group("results").add_argument(
        "--json", type=Path, metavar="FILE", help="all rounds, the machine and the versions"
    )


def run(given: argparse.Namespace) -> int:
    """Measure; returns the exit status.

    Raises:
        OptionError: an option is out of range.
    """
    sizes = _sizes(given.num_requests)
    for name in ("prompt_tokens", "output_tokens", "rounds"):
        if getattr(given, name) < 1:
            raise OptionError(f"--{name.replace('_', '-')}: {getattr(given, name)} is below 1")
    check_writable(given.json, "--json")
    console = Console()
    rounds: list[Round] = []
    status = 0
    try:
        for one in _rounds(given, sizes):
            rounds.append(one)
            _print_round(console, one)
    except (EngineError, ModelNotFound, ServerUnusable) as error:
        print(f"ringserve: error: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        print("\nringserve: stopped", file=sys.stderr)
        status = 130
    if rounds:
        rows = summarize(rounds)
        print_rows(console, rows)
        _print_others(console, rounds)
        if given.json is not None:
            write_json(given.json, document(_command(given), summary=rows, rounds=rounds))
    return status


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise OptionError(f"--num-requests: {text!r} is not a list of numbers such as 8,32") from None
    if min(sizes) < 1:
        raise OptionError(f"--num-requests: {min(sizes)} is below 1")
    return sizes


def _rounds(given: argparse.Namespace, sizes: Sequence[int]) -> Iterator[Round]:
    """Every size in every round, the two sides one after the other; the first side of a round alternates."""
    engine = {name: getattr(given, name) for name in ENGINE_OPTIONS if getattr(given, name) is not None}
    with contextlib.ExitStack() as stack:
        try:
            llm = stack.enter_context(LLM(given.model, **engine))
        except ValueError as error:
            raise OptionError(str(error)) from None
        ids = TokenIds(llm.vocab_size // 10, llm.vocab_size * 8 // 10)  # the ends hold special and rare tokens
        load = Load(given.prompt_tokens, given.output_tokens, given.seed, ids)
        if load.prompt_tokens + load.output_tokens > llm.max_model_len:
            raise OptionError(
                f"--prompt-tokens and --output-tokens: {load.prompt_tokens} + {load.output_tokens} do not fit into the "
                f"context of {llm.max_model_len} tokens"
            )
        server = stack.enter_context(Server(given.model, engine)) if given.against_serving else None
        warm = load.prompts("warm-up", min(8, max(sizes)))
        _ask_offline(llm, warm, WARMUP_TOKENS)
        if server is not None:
            server.ask(warm, WARMUP_TOKENS)
        for number in range(given.rounds):
            for size in sizes:
                yield _one_round(llm, server, load, size, number)


def _one_round(llm: LLM, server: Server | None, load: Load, size: int, number: int) -> Round:
    prompts = load.prompts(f"{number} {size}", size)
    machine, own, started = machine_cpu_seconds(), _our_cpu(llm, server), time.perf_counter()
    if server is not None and number % 2:
        serving: Side | None = server.ask(prompts, load.output_tokens)
        offline = _ask_offline(llm, prompts, load.output_tokens)
    else:
        offline = _ask_offline(llm, prompts, load.output_tokens)
        serving = None if server is None else server.ask(prompts, load.output_tokens)
    wall = time.perf_counter() - started
    others = machine_cpu_seconds() - machine - (_our_cpu(llm, server) - own)
    return Round(size, number, offline, serving, max(0.0, others) / wall)


def _ask_offline(llm: LLM, prompts: Sequence[Sequence[int]], output_tokens: int) -> Side:
    params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
    before, started = _cpu_by_process(llm.pids()), time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    made = sum(len(output.outputs[0].token_ids) for output in outputs)
    if made != len(prompts) * output_tokens:
        raise EngineError(f"{made} tokens were generated instead of {len(prompts) * output_tokens}")
    first = [(m.first_token_time or m.finished_time, m) for m in (output.metrics for output in outputs)]
    return Side(
        seconds=seconds,
        output_tokens_per_s=made / seconds,
        ttft_ms_p50=1e3 * statistics.median(at - m.arrival_time for at, m in first),
        tpot_ms_p50=1e3 * statistics.median((m.finished_time - at) / (output_tokens - 1) for at, m in first)
        if output_tokens > 1
        else None,
        cpu_seconds=_difference(before, _cpu_by_process(llm.pids())),
        hops_us={},
    )


class Server:
    """``ringserve serve`` with the same options."""

    def __init__(self, model: str | None, engine: Mapping[str, object]) -> None:
        flags = [word for name, value in engine.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        command = [sys.executable, "-P", "-m", "ringserve", "serve", *([model] if model else []), *flags]
        self._server = CommandServer([*command, "--port", "{port}", "--log-level", "warning"])
        self._model = ""

    def __enter__(self) -> Server:
        try:
            self._model = self._server.wait_until_ready(START_TIMEOUT)
        except BaseException:
            self._server.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()

    def pids(self) -> dict[str, int]:
        """By the processes' names."""
        return {_name(pid): pid for pid in self._server.tree.pids()}

    def ask(self, prompts: Sequence[list[int]], output_tokens: int) -> Side:
        """All prompts at once, streaming.

        Raises:
            ServerUnusable: a request failed.
        """
        parameters = {"temperature": 0, "ignore_eos": True}
        builder = BodyBuilder("completions", self._model, parameters=parameters)
        jobs = [Job((Turn(prompt, output_tokens),)) for prompt in prompts]
        before, hops = _cpu_by_process(self.pids()), self._hop_sums()
        metrics = compute(uvloop.run(self._send(builder, jobs)), {})
        if metrics.failed or metrics.output_tokens != len(prompts) * output_tokens:
            reason = metrics.errors[0].first_message if metrics.errors else f"{metrics.output_tokens} tokens came"
            raise ServerUnusable(f"a batch over HTTP failed: {reason}")
        used = _difference(before, _cpu_by_process(self.pids()))
        return Side(
            seconds=metrics.duration_s,
            output_tokens_per_s=metrics.output_tokens_per_s,
            ttft_ms_p50=metrics.ttft_ms.p50 if metrics.ttft_ms is not None else 0.0,
            tpot_ms_p50=metrics.tpot_ms.p50 if metrics.tpot_ms is not None else None,
            cpu_seconds=used,
            hops_us=_means(hops, self._hop_sums()),
        )

    async def _send(self, builder: BodyBuilder, jobs: Sequence[Job]) -> list[RequestRecord]:
        client = HttpClient(self._server.endpoint)
        generator = LoadGenerator(client, builder, timeout=REQUEST_TIMEOUT)
        try:
            prepared = [generator.prepare(job) for job in jobs]
            await generator.run(iter(prepared), ClosedLoop(len(jobs)))
        finally:
            client.close()
        return generator.records

    def _hop_sums(self) -> dict[str, tuple[float, float]]:
        """(seconds, count) of each hop so far."""
        try:
            answer = httpx.get(f"http://{self._server.endpoint.address}/metrics", timeout=30, trust_env=False)
        except httpx.HTTPError as error:
            raise ServerUnusable(f"/metrics: {error}\n{self._server.last_output()}".rstrip()) from None
        return hop_sums(answer.text)


def hop_sums(exposition: str) -> dict[str, tuple[float, float]]:
    """(seconds, count) by hop, from the text of /metrics."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(exposition):
        if family.name == "ringserve_hop_seconds":
            for sample in family.samples:
                found.setdefault(sample.labels["hop"], {})[sample.name.rpartition("_")[2]] = sample.value
    return {hop: (parts["sum"], parts["count"]) for hop, parts in found.items()}


def _means(before: Mapping[str, tuple[float, float]], after: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    means = {}
    for hop, (seconds, count) in after.items():
        old_seconds, old_count = before.get(hop, (0.0, 0.0))
        if count > old_count:
            means[hop] = (seconds - old_seconds) / (count - old_count) * 1e6
    return means


def _cpu_by_process(pids: Mapping[str, int]) -> dict[str, float]:
    return {"client": time.process_time(), **{name: _cpu_seconds(pid) for name, pid in pids.items()}}


def _our_cpu(llm: LLM, server: Server | None) -> float:
    pids = list(llm.pids().values()) + (list(server.pids().values()) if server is not None else [])
    return time.process_time() + sum(map(_cpu_seconds, pids))


def _cpu_seconds(pid: int) -> float:
    """User and system time; nanoseconds where the kernel counts them (a tick is coarse here). 0 if it has ended."""
    try:
        return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")) * 1e-9
    except OSError:  # a thread ended just now, or there is no such file
        with contextlib.suppress(OSError):
            return tree_seconds([pid])
        return 0.0


def _name(pid: int) -> str:
    try:
        comm = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "ended"
    return comm.removeprefix("rs-") if comm.startswith("rs-") else "supervisor"


def _difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def summarize(rounds: Sequence[Round]) -> list[Row]:
    """Medians and ratios; sizes in their order."""
    rows = []
    for size in dict.fromkeys(one.num_requests for one in rounds):
        these = [one for one in rounds if one.num_requests == size]
        offline = [one.offline for one in these]
        serving = [one.serving for one in these if one.serving is not None]
        ratios = [
            one.serving.output_tokens_per_s / one.offline.output_tokens_per_s
            for one in these
            if one.serving is not None
        ]
        rows.append(
            Row(
                num_requests=size,
                offline_tokens_per_s=statistics.median(side.output_tokens_per_s for side in offline),
                serving_tokens_per_s=statistics.median(side.output_tokens_per_s for side in serving)
                if serving
                else None,
                ratio=statistics.median(ratios) if ratios else None,
                ratio_low=min(ratios, default=None),
                ratio_high=max(ratios, default=None),
                ttft_ms_p50=_by_side(offline, serving, lambda side: side.ttft_ms_p50),
                tpot_ms_p50=_by_side(offline, serving, lambda side: side.tpot_ms_p50),
                offline_cpu_ms_per_token=_cpu_per_token(offline),
                serving_cpu_ms_per_token=_cpu_per_token(serving),
                hops_us=_medians([side.hops_us for side in serving]),
            )
        )
    return rows


def _by_side(
    offline: Sequence[Side], serving: Sequence[Side], read: Callable[[Side], float | None]
) -> dict[str, float]:
    found = {}
    for name, sides in (("offline", offline), ("serving", serving)):
        values = [value for side in sides if (value := read(side)) is not None]
        if values:
            found[name] = statistics.median(values)
    return found


def _cpu_per_token(sides: Sequence[Side]) -> dict[str, float]:
    """Milliseconds of CPU time by process, for each output token."""
    shares = []
    for side in sides:
        tokens = side.output_tokens_per_s * side.seconds
        shares.append({name: seconds * 1e3 / tokens for name, seconds in side.cpu_seconds.items()})
    return _medians(shares)


def _medians(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for one in each for name in one)
    return {name: statistics.median(one[name] for one in each if name in one) for name in names}


def print_rows(console: Console, rows: Sequence[Row]) -> None:
    """Throughput, then where the time and the CPU go."""
    table = Table(box=None, padding=(0, 2, 0, 0), title="medians of output tokens/s", title_justify="left")
    for name in ("requests", "offline", "serving", "serving / offline (lowest-highest round)"):
        table.add_column(name, justify="right")
    for row in rows:
        ratio = "-" if row.ratio is None else f"{row.ratio:.3f} ({row.ratio_low:.3f}-{row.ratio_high:.3f})"
        served = "-" if row.serving_tokens_per_s is None else f"{row.serving_tokens_per_s:.1f}"
        table.add_row(str(row.num_requests), f"{row.offline_tokens_per_s:.1f}", served, ratio)
    console.print(table)
    for row in rows:
        console.print(f"\n{row.num_requests} requests", highlight=False)
        console.print(f"  TTFT p50 ms: {_listed(row.ttft_ms_p50, 1)}", highlight=False)
        console.print(f"  TPOT p50 ms: {_listed(row.tpot_ms_p50, 2)}", highlight=False)
        console.print(f"  CPU ms/token, offline: {_listed(row.offline_cpu_ms_per_token, 3)}", highlight=False)
        if row.serving_tokens_per_s is not None:
            console.print(f"  CPU ms/token, serving: {_listed(row.serving_cpu_ms_per_token, 3)}", highlight=False)
            console.print(f"  us of a step on its way: {_listed(row.hops_us, 0)}", highlight=False)


def _listed(values: Mapping[str, float], digits: int) -> str:
    return ", ".join(f"{name} {value:.{digits}f}" for name, value in values.items())


def _print_round(console: Console, one: Round) -> None:
    served = "" if one.serving is None else f", serving {one.serving.output_tokens_per_s:.1f}"
    console.print(
        f"round {one.round + 1}, {one.num_requests} requests: "
        f"offline {one.offline.output_tokens_per_s:.1f}{served} output tokens/s",
        highlight=False,
    )


def _print_others(console: Console, rounds: Sequence[Round]) -> None:
    worst = max(one.other_cores for one in rounds)
    if worst > NOTEWORTHY_CORES:
        console.print(f"\n  other processes used up to {worst:.2f} cores: not a quiet machine", highlight=False)


def _command(given: argparse.Namespace) -> list[str]:
    """The command line that ``given`` came from, defaults written out."""
    words = ["offline"]
    for name, value in vars(given).items():
        if name == "model" or value is None or value is False:
            continue
        words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return words if given.model is None else [*words[:1], given.model, *words[1:]]
