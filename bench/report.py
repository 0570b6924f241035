"""Results as tables for a terminal and as JSON for a file."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from ringserve.bench.machine import describe
from ringserve.bench.measure import Run
from ringserve.bench.metrics import Summary
from ringserve.bench.system_use import NOTEWORTHY_CORES
from ringserve.options import OptionError


def wide_console() -> Console:
    """Standard output; a file or a pipe has no width to keep to."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def print_run(console: Console, run: Run) -> None:
    """All figures of one run."""
    m, s = run.metrics, run.system
    table = Table(title=str(run.point), title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(justify="right")
    table.add_row("requests completed", f"{m.completed}")
    if m.failed:
        table.add_row("requests failed", f"[red]{m.failed}[/]")
    if m.interrupted:
        table.add_row("requests interrupted", f"{m.interrupted}")
    table.add_row("duration", f"{m.duration_s:.2f} s")
    table.add_row("requests/s", f"{m.requests_per_s:.2f}")
    table.add_row("output tokens/s", f"{m.output_tokens_per_s:.1f}")
    if m.total_tokens_per_s is not None:
        table.add_row("total tokens/s", f"{m.total_tokens_per_s:.1f}")
    table.add_row(
        "output / prompt tokens", f"{m.output_tokens} / {'?' if m.prompt_tokens is None else m.prompt_tokens}"
    )
    table.add_row("requests at once (mean)", f"{m.mean_concurrency:.1f}")
    if m.goodput is not None:
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in m.goodput.objectives_ms.items())
        table.add_row(f"goodput ({limits})", f"{m.goodput.requests_per_s:.2f} requests/s = {m.goodput.part:.0%}")
    if s.server_cores is not None and s.server_cpu_seconds is not None and s.server_peak_resident_bytes is not None:
        table.add_row("server CPU", f"{s.server_cpu_seconds:.2f} s = {s.server_cores:.2f} cores")
        table.add_row("server memory, peak", f"{s.server_peak_resident_bytes / 2**20:.0f} MiB")
    table.add_row("client CPU", f"{s.client_cores:.3f} cores")
    console.print(table)
    console.print(_latencies(run))
    for note in notes(run):
        console.print(f"  {note}", markup=False, highlight=False)
    console.print()


def _latencies(run: Run) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("ms", justify="left")
    for name in ("mean", "p50", "p90", "p99", "max"):
        table.add_column(name, justify="right")
    for title, summary in latencies(run):
        if summary is not None:
            table.add_row(title, *(f"{value:.1f}" for value in msgspec.structs.astuple(summary)))
    return table


def latencies(run: Run) -> list[tuple[str, Summary | None]]:
    """(name, distribution)"""
    m = run.metrics
    return [("TTFT", m.ttft_ms), ("ITL", m.itl_ms), ("TPOT", m.tpot_ms), ("E2E", m.e2e_ms)]


def notes(run: Run) -> list[str]:
    """What a reader must know before believing the figures."""
    m, s = run.metrics, run.system
    found = [f"{error.kind}: {error.count} x, first: {error.first_message}" for error in m.errors]
    if run.stopped:
        found.append("stopped by the user: figures are of what had ended until then")
    if m.tokens_from != "usage":
        found.append(
            "the server sent no usage: tokens are counted as chunks"
            + ("" if m.tokens_from == "chunks" else " where it is missing")
        )
    elif m.tokens_per_chunk is not None and m.tokens_per_chunk > 1.05:
        found.append(
            f"a chunk carries {m.tokens_per_chunk:.2f} tokens on average: ITL is between chunks, TPOT is per token"
        )
    if run.retried:
        found.append(f"{run.retried} requests were sent again: the server had closed their idle connections")
    if m.send_lag_ms_max > 20:
        found.append(f"a request was sent {m.send_lag_ms_max:.0f} ms later than scheduled")
    if s.server_ended:
        found.append("the server's process ended during the run: its use is what was last seen")
    if s.other_cores is None:
        found.append("the server is not a visible process of this machine: its use and that of others is not known")
    elif s.other_cores > NOTEWORTHY_CORES:
        found.append(f"other processes used {s.other_cores:.2f} cores: not a quiet machine")
    return found


def print_overview(console: Console, runs: Sequence[Run]) -> None:
    """A sweep in one table."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for name in ("ok", "failed", "req/s", "out tok/s", "TTFT p50", "p99", "ITL p50", "p99", "TPOT p50", "E2E p50"):
        table.add_column(name, justify="right")
    for run in runs:
        m = run.metrics
        table.add_row(
            str(run.point),
            str(m.completed),
            str(m.failed),
            f"{m.requests_per_s:.2f}",
            f"{m.output_tokens_per_s:.1f}",
            *(_of(m.ttft_ms, name) for name in ("p50", "p99")),
            *(_of(m.itl_ms, name) for name in ("p50", "p99")),
            _of(m.tpot_ms, "p50"),
            _of(m.e2e_ms, "p50"),
        )
    console.print(table)


def _of(summary: Summary | None, name: str) -> str:
    return "-" if summary is None else f"{getattr(summary, name):.1f}"


def document(arguments: Sequence[str], **parts: Any) -> dict[str, Any]:
    """A result for a file: the command, the machine, and ``parts`` as plain JSON types."""
    head = {"command": shlex.join(["ringserve", "bench", *without_key(arguments)]), "machine": describe()}
    return {**head, **{name: _plain(msgspec.to_builtins(part)) for name, part in parts.items()}}


def _plain(value: Any) -> Any:
    """An infinite rate as the word that asks for it: JSON has no number for it."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and math.isinf(value) else value


def without_key(arguments: Sequence[str]) -> list[str]:
    """A command line that can be kept: the API key is left out."""
    kept, hide = [], False
    for argument in arguments:
        kept.append("***" if hide else "--api-key=***" if argument.startswith("--api-key=") else argument)
        hide = argument == "--api-key"
    return kept


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write it, indented.

    Raises:
        OptionError: it cannot be written, after all.
    """
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
    except OSError as error:
        raise OptionError(f"--json: {path}: {error.strerror}") from None


def check_writable(path: Path | None, flag: str) -> None:
    """A result that cannot be written should fail before the run.

    Raises:
        OptionError: the directory does not exist, or nothing may be written there.
    """
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise OptionError(f"{flag}: {path.parent}: no such directory")
    if path.is_dir():
        raise OptionError(f"{flag}: {path} is a directory")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise OptionError(f"{flag}: {path} cannot be written")
