"""``ringserve bench serve``: load on one running server, and what came of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ringserve.bench.http_client import Endpoint
from ringserve.bench.load_options import add_load_arguments, api_key, read_load_options
from ringserve.bench.measure import Run, ServerUnusable, find_model, measure
from ringserve.bench.plot import check_plot, plot
from ringserve.bench.processes import ProcessTree, find_server
from ringserve.bench.prompts import DatasetError
from ringserve.bench.report import check_writable, document, print_overview, print_run, wide_console, write_json
from ringserve.options import OptionError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What it takes."""
    add = parser.add_argument_group("server").add_argument
    add("--url", default="http://127.0.0.1:8000/v1", help="the API's base (default: %(default)s)")
    add("--model", metavar="NAME", help="default: the first one that the server lists")
    add("--api-key", type=api_key, metavar="KEY", help="if the server asks for one")
    add("--wait", type=float, default=0.0, metavar="SECONDS", help="for the server to get ready")
    add("--server-pid", type=int, metavar="PID", help="the local server's top process, where its port does not tell")
    add_load_arguments(parser)
    add = parser.add_argument_group("results").add_argument
    add("--json", type=Path, metavar="FILE", help="all figures, the machine and the versions")
    add("--save-raw", action="store_true", help="each request's time stamps in the JSON file as well")
    add("--plot", type=Path, metavar="FILE", help="throughput against latency, .png or .svg (extra: ringserve[bench])")


def run(given: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Measure; returns the exit status: 1 if no request succeeded, 130 after Ctrl-C.

    Raises:
        OptionError: the options do not go together.
    """
    check_writable(given.json, "--json")
    check_writable(given.plot, "--plot")
    check_plot(given.plot)
    if not given.wait >= 0:
        raise OptionError(f"--wait: {given.wait} is not 0 or above")
    if given.save_raw and given.json is None:
        raise OptionError("--save-raw: needs --json")
    if given.server_pid is not None and not Path(f"/proc/{given.server_pid}/stat").exists():
        raise OptionError(f"--server-pid: there is no process {given.server_pid}")
    options = read_load_options(given, keep_records=given.save_raw)
    try:
        endpoint = Endpoint.parse(given.url, given.api_key)
    except ValueError as error:
        raise OptionError(f"--url: {error}") from None
    console, errors = wide_console(), Console(stderr=True)
    runs: list[Run] = []
    server: ProcessTree | None = None
    model = given.model
    try:
        model = model or find_model(endpoint, wait=given.wait, timeout=min(10.0, options.timeout))
        server = ProcessTree(given.server_pid) if given.server_pid else find_server(endpoint.host, endpoint.port)
        for index, point in enumerate(options.points):
            seed = f"{options.seed} {index}"  # fresh prompts at each point: no prefix of the last one is still cached
            with progress_bar(errors) as progress:
                done = measure(endpoint, model, options, point, seed=seed, server=server, progress=progress)
            runs.append(done)
            print_run(console, done)
            if done.stopped:
                break
    except (ServerUnusable, DatasetError) as error:
        print(f"ringserve: error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("\nringserve: stopped", file=sys.stderr)
        return 130
    if len(runs) > 1:
        print_overview(console, runs)
    if given.json is not None:
        pids = server.pids() if server else None
        about = {"url": endpoint.url, "model": model, "pids": pids}
        write_json(given.json, document(["serve", *arguments], server=about, runs=runs))
    if given.plot is not None and any(each.metrics.completed for each in runs):
        plot(given.plot, {model or "": runs}, f"{model} at {endpoint.url}")
    if any(each.stopped for each in runs):
        return 130
    return 0 if any(each.metrics.completed for each in runs) else 1


def progress_bar(console: Console) -> Progress:
    """Drawn by the run's own clock: a thread of its own would compete with the load's."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        auto_refresh=False,
        disable=not console.is_terminal,
    )
