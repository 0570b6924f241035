"""``ringserve bench startup``: from ``exec`` to ready, and to the first token of an answer of one token.

Each run starts a server anew. The first one fills the page cache and is not counted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from ringserve.bench.bodies import Api, BodyBuilder
from ringserve.bench.measure import ServerUnusable, ask_once
from ringserve.bench.metrics import percentile
from ringserve.bench.processes import machine_cpu_seconds
from ringserve.bench.prompts import Job, Turn
from ringserve.bench.report import check_writable, document, write_json
from ringserve.bench.server_command import CommandServer, split_command
from ringserve.bench.system_use import NOTEWORTHY_CORES
from ringserve.options import OptionError

OURS = (sys.executable, "-P", "-m", "ringserve", "serve", "--port", "{port}")


class Start(msgspec.Struct, frozen=True):
    """One start; seconds from exec."""

    ready: float
    """The server lists its models."""
    first_token: float
    server_cpu_seconds: float
    other_cores: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What it takes."""
    parser.add_argument(
        "--command", metavar="COMMAND", help="server to start, with {port} in it (default: ringserve serve)"
    )
    parser.add_argument("--api", choices=("completions", "chat"), default="chat", help="default: %(default)s")
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="counted ones (default: %(default)s)")
    parser.add_argument("--start-timeout", type=float, default=600.0, metavar="SECONDS", help="default: %(default)g")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all runs, the machine and the versions")


def run(given: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Measure; returns the exit status.

    Raises:
        OptionError: an option is out of range.
    """
    if given.runs < 1:
        raise OptionError(f"--runs: {given.runs} is below 1")
    if given.command is not None:
        try:
            split_command(given.command)
        except ValueError as error:
            raise OptionError(f"--command: {error}") from None
    if not given.start_timeout > 0:
        raise OptionError(f"--start-timeout: {given.start_timeout} is not above 0")
    check_writable(given.json, "--json")
    console = Console()
    starts: list[Start] = []
    status = 0
    try:
        for number in range(given.runs + 1):
            start = one_start(given.command or OURS, given.start_timeout, given.api)
            counted = "" if number else " (not counted)"
            console.print(
                f"ready after {start.ready:.2f} s, first token after {start.first_token:.2f} s{counted}",
                highlight=False,
            )
            if number:
                starts.append(start)
    except ServerUnusable as error:
        print(f"ringserve: error: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        print("\nringserve: stopped", file=sys.stderr)
        status = 130
    if starts:
        _print(console, starts)
        if given.json is not None:
            write_json(given.json, document(["startup", *arguments], summary=summaries(starts), runs=starts))
    return status


def one_start(command: str | Sequence[str], timeout: float, api: Api = "chat") -> Start:
    """Start, ask for one token, end.

    Raises:
        ServerUnusable: it did not get ready, or did not answer.
    """
    machine, own = machine_cpu_seconds(), time.process_time()
    with CommandServer(command) as server:
        model = server.wait_until_ready(timeout)
        ready = time.perf_counter()
        answer = ask_once(server.endpoint, BodyBuilder(api, model), Job((Turn("Hello", 1),)), timeout)
        if answer.failure is not None:
            raise ServerUnusable(f"{answer.failure.kind}: {answer.failure.message}\n{server.last_output()}")
        used = server.tree.cpu_seconds()
        wall = time.perf_counter() - server.started
        others = machine_cpu_seconds() - machine - (time.process_time() - own) - used
        first = answer.chunk_times[0]
        return Start(ready - server.started, first - server.started, used, max(0.0, others) / wall)


def summaries(starts: Sequence[Start]) -> dict[str, dict[str, float]]:
    """Percentiles of both times, in seconds."""
    found = {}
    for name in ("ready", "first_token"):
        values = [getattr(start, name) for start in starts]
        found[name] = {f"p{part}": percentile(values, part / 100) for part in (50, 90, 99)}
    return found


def _print(console: Console, starts: Sequence[Start]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("seconds from exec to", "p50", "p90", "p99"):
        table.add_column(name, justify="right")
    for name, parts in summaries(starts).items():
        table.add_row(name.replace("_", " "), *(f"{value:.2f}" for value in parts.values()))
    console.print(table)
    worst = max(start.other_cores for start in starts)
    if worst > NOTEWORTHY_CORES:
        console.print(f"  other processes used up to {worst:.2f} cores: not a quiet machine", highlight=False)
