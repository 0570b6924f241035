"""``ringserve bench ipc``: the rings against other ways from process to process. No model is needed.

Every figure comes from interleaved rounds, and is compared with pyzmq's of the same round. With ``--live URL`` nothing
is compared: a running server's own counters and stamps are read before and after a short load.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from rich.console import Console

from ringserve.bench import ipc_live, ipc_report
from ringserve.bench.ipc_links import BASELINE, LINKS, available
from ringserve.bench.ipc_results import Results
from ringserve.bench.ipc_rounds import Measurement, Plan
from ringserve.bench.machine import describe
from ringserve.bench.plot import check_plot
from ringserve.bench.processes import machine_cpu_seconds
from ringserve.bench.report import check_writable, document, write_json
from ringserve.bench.system_use import NOTEWORTHY_CORES
from ringserve.options import OptionError

FAMILIES = ("one-way", "throughput", "idle", "uvloop", "engine")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What it takes."""
    plan = Plan(transports=())
    parser.add_argument(
        "--transports", metavar="A,B", help=f"of {', '.join(LINKS)} (default: all that are installed; {BASELINE} is 1)"
    )
    parser.add_argument("--families", metavar="A,B", help=f"of {', '.join(FAMILIES)} (default: all)")
    parser.add_argument(
        "--sizes",
        metavar="N,N",
        default=",".join(map(str, plan.sizes)),
        help="bytes of a message (default: %(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=plan.rounds, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--samples", type=int, default=plan.samples, metavar="N", help="messages of each cell (default: %(default)s)"
    )
    parser.add_argument(
        "--messages", type=int, default=plan.messages, metavar="N", help="for throughput (default: %(default)s)"
    )
    parser.add_argument(
        "--idle-seconds", type=float, default=plan.idle_seconds, metavar="SECONDS", help="default: %(default)g"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures, the machine and the versions")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the tables for a document")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture (.png or .svg; needs matplotlib)")
    ipc_live.add_arguments(parser)


def run(given: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Measure; returns the exit status.

    Raises:
        OptionError: an option is out of range, or what it needs is not installed.
    """
    check_writable(given.json, "--json")
    check_writable(given.markdown, "--markdown")
    check_plot(given.plot)
    console = Console()
    if given.live is not None:
        return ipc_live.run(given, ["ipc", *arguments], console)
    plan = _plan(given)
    try:
        results = _measure(plan, console)
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    if BASELINE not in plan.transports:
        results.notes.append(f"{BASELINE} was not measured (pip install 'ringserve[bench]'): no ratios")
    ipc_report.print_results(console, results)
    machine = describe()
    if given.json:
        write_json(given.json, document(["ipc", *arguments], plan=plan, results=results))
    head = f"{machine['processor']}, {machine['cores']} cores, Linux {machine['kernel']}, Python {machine['python']}"
    if given.markdown:
        given.markdown.write_text(ipc_report.markdown(results, head), encoding="utf-8")
    if given.plot:
        ipc_report.plot(given.plot, results, head)
    return 0


def _measure(plan: Plan, console: Console) -> Results:
    before = (time.monotonic(), _own_cpu_seconds(), machine_cpu_seconds())
    with console.status("starting") as status:
        results = Measurement(plan, status.update).run()
    wall, own, machine = (now - then for now, then in zip(
        (time.monotonic(), _own_cpu_seconds(), machine_cpu_seconds()), before, strict=True
    ))  # fmt: skip
    others = max(0.0, machine - own) / wall
    results.notes.append(f"measured in {wall:.0f} s; other processes used {others:.2f} cores meanwhile")
    if others > NOTEWORTHY_CORES:
        results.notes.append("NOT a quiet machine: medians and ratios may still hold, tails do not")
    if len(os.sched_getaffinity(0)) < 2:
        results.notes.append("one processor: nothing could be measured across cores")
    return results


def _own_cpu_seconds() -> float:
    """Of this process and the children it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _plan(given: argparse.Namespace) -> Plan:
    installed = available()
    transports = tuple(_chosen(given.transports, "--transports", LINKS)) if given.transports else tuple(installed)
    for name in transports:
        if name not in installed:
            raise OptionError(f"--transports: {name} is not installed")
    for flag, value, least in (
        ("--rounds", given.rounds, 1),
        ("--samples", given.samples, 1),
        ("--messages", given.messages, 1),
        ("--idle-seconds", given.idle_seconds, 0),
    ):
        if not value >= least:
            raise OptionError(f"{flag}: {value} is below {least}")
    try:
        sizes = tuple(int(size) for size in given.sizes.split(","))
    except ValueError:
        raise OptionError(f"--sizes: {given.sizes!r} is not a list of numbers") from None
    if any(not 32 <= size <= 32 << 20 for size in sizes):
        raise OptionError("--sizes: a message has 32 bytes to 32 MiB")
    return Plan(
        transports=transports,
        sizes=sizes,
        rounds=given.rounds,
        samples=given.samples,
        messages=given.messages,
        idle_seconds=given.idle_seconds,
        families=tuple(_chosen(given.families, "--families", FAMILIES)) if given.families else FAMILIES,
    )


def _chosen(given: str, flag: str, known: Collection[str]) -> list[str]:
    chosen = given.split(",")
    for name in chosen:
        if name not in known:
            raise OptionError(f"{flag}: {name!r} is none of {', '.join(known)}")
    return chosen
