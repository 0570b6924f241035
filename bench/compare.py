"""``ringserve bench compare``: servers side by side, in interleaved rounds with the same requests."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ringserve.bench.busy import busy_processes
from ringserve.bench.http_client import Endpoint
from ringserve.bench.load_options import LoadOptions, Point, add_load_arguments, api_key, read_load_options
from ringserve.bench.measure import Run, ServerUnusable, find_model, measure
from ringserve.bench.metrics import Goodput, Summary
from ringserve.bench.plot import check_plot, plot
from ringserve.bench.processes import ProcessTree, find_server
from ringserve.bench.prompts import DatasetError
from ringserve.bench.report import check_writable, document, notes, wide_console, write_json
from ringserve.bench.serve import progress_bar
from ringserve.bench.server_command import CommandServer, split_command
from ringserve.options import OptionError

MAX_BUSY = 256


@dataclass(frozen=True)
class Target:
    """A server to measure: one that runs at ``url``, or one that ``command`` starts."""

    name: str
    url: str | None = None
    command: str | None = None


class ServerRun(msgspec.Struct):
    """One server's run in one round."""

    server: str
    round: int
    run: Run


class Ratio(msgspec.Struct, frozen=True):
    """To the first server in the same round: median and extremes over the rounds."""

    median: float
    low: float
    high: float


class Row(msgspec.Struct, frozen=True):
    """One server at one point: medians over the rounds, and ratios to the first server."""

    server: str
    point: Point
    rounds: int
    failed: int
    medians: dict[str, float]
    ratios: dict[str, Ratio]


def _part(whole: Summary | Goodput | None, name: str) -> float | None:
    return None if whole is None else getattr(whole, name)


FIGURES: dict[str, Callable[[Run], float | None]] = {
    "output_tokens_per_s": lambda run: run.metrics.output_tokens_per_s or None,
    "ttft_ms_p50": lambda run: _part(run.metrics.ttft_ms, "p50"),
    "ttft_ms_p99": lambda run: _part(run.metrics.ttft_ms, "p99"),
    "itl_ms_p50": lambda run: _part(run.metrics.itl_ms, "p50"),
    "itl_ms_p99": lambda run: _part(run.metrics.itl_ms, "p99"),
    "tpot_ms_p50": lambda run: _part(run.metrics.tpot_ms, "p50"),
    "e2e_ms_p50": lambda run: _part(run.metrics.e2e_ms, "p50"),
    "goodput_requests_per_s": lambda run: _part(run.metrics.goodput, "requests_per_s"),
    "server_cores": lambda run: run.system.server_cores,
    "server_peak_resident_bytes": lambda run: run.system.server_peak_resident_bytes,
}


_SHOWN = {
    "output_tokens_per_s": "output tokens/s",
    "goodput_requests_per_s": "goodput, requests/s",
    "ttft_ms_p50": "TTFT p50, ms",
    "ttft_ms_p99": "TTFT p99, ms",
    "itl_ms_p50": "ITL p50, ms",
    "itl_ms_p99": "ITL p99, ms",
    "tpot_ms_p50": "TPOT p50, ms",
    "e2e_ms_p50": "E2E p50, ms",
    "server_cores": "server CPU, cores",
    "server_peak_resident_bytes": "server memory, MiB",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What it takes."""
    add = parser.add_argument_group("servers (two or more; ratios are to the first)").add_argument
    add("--server", dest="targets", action="append", type=_running, metavar="NAME=URL", help="one that is running")
    add(
        "--command",
        dest="targets",
        action="append",
        type=_started,
        metavar="NAME=COMMAND",
        help="one to start, listening on 127.0.0.1:{port}; `env A=B command` sets variables",
    )
    add("--api-key", type=api_key, metavar="KEY", help="for all of them")
    add("--model", metavar="NAME", help="default: the first one that each server lists")
    add("--rounds", type=int, default=3, metavar="N", help="default: %(default)s")
    add(
        "--one-at-a-time",
        action="store_true",
        help="start and end the servers of --command in each round, instead of leaving all idle but one",
    )
    add(
        "--busy",
        type=int,
        default=0,
        metavar="N",
        help="run N more processes that compute all the time, beside the servers that are being measured",
    )
    add("--start-timeout", type=float, default=600.0, metavar="SECONDS", help="default: %(default)g")
    add_load_arguments(parser)
    add = parser.add_argument_group("results").add_argument
    add("--json", type=Path, metavar="FILE", help="all figures of all runs, the machine and the versions")
    add("--plot", type=Path, metavar="FILE", help="throughput against latency, .png or .svg (extra: ringserve[bench])")


def run(given: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Measure; returns the exit status: 1 if a server could not be measured, 130 after Ctrl-C.

    Raises:
        OptionError: the options do not go together.
    """
    targets: list[Target] = given.targets or []
    names = [target.name for target in targets]
    if len(targets) < 2 or len(set(names)) < len(names):
        raise OptionError("give two or more servers with different names: --server NAME=URL, --command NAME=COMMAND")
    if given.rounds < 1:
        raise OptionError(f"--rounds: {given.rounds} is below 1")
    if not 0 <= given.busy <= MAX_BUSY:
        raise OptionError(f"--busy: {given.busy} is not from 0 to {MAX_BUSY}")
    if not given.start_timeout > 0:
        raise OptionError(f"--start-timeout: {given.start_timeout} is not above 0")
    check_writable(given.json, "--json")
    check_writable(given.plot, "--plot")
    check_plot(given.plot)
    options = read_load_options(given)
    console = wide_console()
    found: list[ServerRun] = []
    status = 0
    try:
        for one in _runs(given, options, targets):
            found.append(one)
            _print_progress(console, one)
            if one.run.stopped:
                status = 130
                break
    except (ServerUnusable, DatasetError) as error:
        print(f"ringserve: error: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        print("\nringserve: stopped", file=sys.stderr)
        status = 130
    rows = summarize_rounds(found, names)
    print_rows(console, rows)
    if given.json is not None:
        about = [{"name": t.name, "url": t.url, "command": t.command} for t in targets]
        write_json(given.json, document(["compare", *arguments], servers=about, summary=rows, runs=found))
    if given.plot is not None and any(one.run.metrics.completed for one in found):
        plot(given.plot, {name: median_runs(found, name) for name in names}, " / ".join(names))
    return status or int(any(not _completed(found, name) for name in names))


def _runs(given: argparse.Namespace, options: LoadOptions, targets: Sequence[Target]) -> Iterator[ServerRun]:
    """Round by round. Within a round every server gets the same requests; each round and point has its own."""

    def one(target: Target, server: _Ready, number: int, index: int) -> ServerRun:
        seed = f"{options.seed} {number} {index}"
        with progress_bar(Console(stderr=True)) as progress, busy_processes(given.busy):
            done = measure(
                server.endpoint,
                given.model or server.model,
                options,
                options.points[index],
                seed=seed,
                server=server.tree,
                progress=progress,
            )
        return ServerRun(target.name, number, done)

    if given.one_at_a_time:
        for number in range(given.rounds):
            for target in targets:
                with contextlib.ExitStack() as stack:
                    server = _get_ready(target, given, stack)
                    for index in range(len(options.points)):
                        yield one(target, server, number, index)
        return
    with contextlib.ExitStack() as stack:
        ready = [(target, _get_ready(target, given, stack)) for target in targets]
        for number in range(given.rounds):
            for index in range(len(options.points)):
                for target, server in ready:
                    yield one(target, server, number, index)


@dataclass(frozen=True)
class _Ready:
    endpoint: Endpoint
    model: str
    tree: ProcessTree | None


def _get_ready(target: Target, given: argparse.Namespace, stack: contextlib.ExitStack) -> _Ready:
    try:
        if target.command is not None:
            server = stack.enter_context(CommandServer(target.command, given.api_key))
            return _Ready(server.endpoint, server.wait_until_ready(given.start_timeout), server.tree)
        endpoint = Endpoint.parse(target.url or "", given.api_key)
        return _Ready(endpoint, find_model(endpoint), find_server(endpoint.host, endpoint.port))
    except ServerUnusable as error:
        raise ServerUnusable(f"{target.name}: {error}") from None


def summarize_rounds(found: Sequence[ServerRun], names: Sequence[str]) -> list[Row]:
    """Medians and ratios; points in their order, servers in theirs."""
    rows = []
    for point in dict.fromkeys(one.run.point for one in found):
        by_round = {(one.server, one.round): one.run for one in found if one.run.point == point}
        for name in names:
            runs = {number: run for (server, number), run in by_round.items() if server == name}
            if not runs:
                continue
            medians: dict[str, float] = {}
            ratios: dict[str, Ratio] = {}
            for figure, read in FIGURES.items():
                values = {number: value for number, run in runs.items() if (value := read(run)) is not None}
                if values:
                    medians[figure] = statistics.median(values.values())
                shares = []
                for number, value in values.items():
                    first = by_round.get((names[0], number))
                    if first is not None and (base := read(first)):
                        shares.append(value / base)
                if shares:
                    ratios[figure] = Ratio(statistics.median(shares), min(shares), max(shares))
            failed = sum(run.metrics.failed for run in runs.values())
            rows.append(Row(name, point, len(runs), failed, medians, ratios))
    return rows


def print_rows(console: Console, rows: Sequence[Row]) -> None:
    """One table: servers side by side; behind a median its ratio to the first server and the rounds' extremes."""
    if not rows:
        return
    names = list(dict.fromkeys(row.server for row in rows))
    table = Table(box=None, padding=(0, 2, 0, 0), title="medians (ratio to the first: median, lowest-highest round)")
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(escape(name), justify="right", no_wrap=True)
    for point in dict.fromkeys(row.point for row in rows):
        here = {row.server: row for row in rows if row.point == point}
        table.add_row(f"[bold]{point}[/]")
        for figure, title in _SHOWN.items():
            if any(figure in row.medians for row in here.values()):
                table.add_row(title, *(_cell(here.get(name), figure, first=name == names[0]) for name in names))
        if any(row.failed for row in here.values()):
            table.add_row("failed requests", *(str(here[name].failed) if name in here else "-" for name in names))
    console.print(table)


def _cell(row: Row | None, figure: str, *, first: bool) -> str:
    if row is None or figure not in row.medians:
        return "-"
    value = row.medians[figure]
    text = f"{value / 2**20:.0f}" if figure.endswith("bytes") else f"{value:.2f}" if value < 10 else f"{value:.1f}"
    ratio = row.ratios.get(figure)
    return text if first or ratio is None else f"{text} (x{ratio.median:.2f}, {ratio.low:.2f}-{ratio.high:.2f})"


def _print_progress(console: Console, one: ServerRun) -> None:
    m = one.run.metrics
    console.print(
        f"round {one.round + 1}, {one.run.point}, {one.server}: {m.completed} requests, "
        f"{m.output_tokens_per_s:.1f} output tokens/s",
        markup=False,
        highlight=False,
    )
    for note in notes(one.run):
        console.print(f"  {note}", markup=False, highlight=False)


def median_runs(found: Sequence[ServerRun], name: str) -> list[Run]:
    """At each point the run of median throughput."""
    runs: dict[Point, list[Run]] = {}
    for one in found:
        if one.server == name:
            runs.setdefault(one.run.point, []).append(one.run)
    return [sorted(each, key=lambda run: run.metrics.output_tokens_per_s)[len(each) // 2] for each in runs.values()]


def _completed(found: Sequence[ServerRun], name: str) -> bool:
    return any(one.run.metrics.completed for one in found if one.server == name)


def _running(text: str) -> Target:
    name, url = _split(text)
    try:
        Endpoint.parse(url)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return Target(name, url=url)


def _started(text: str) -> Target:
    name, command = _split(text)
    try:
        split_command(command)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return Target(name, command=command)


def _split(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value
