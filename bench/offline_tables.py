"""The lines and tables that ``ringserve bench offline`` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from ringserve.bench.offline_results import Round, Row
from ringserve.bench.system_use import NOTEWORTHY_CORES


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


def print_round(console: Console, one: Round) -> None:
    """As soon as it is there."""
    served = "" if one.serving is None else f", serving {one.serving.output_tokens_per_s:.1f}"
    console.print(
        f"round {one.round + 1}, {one.num_requests} requests: "
        f"offline {one.offline.output_tokens_per_s:.1f}{served} output tokens/s",
        highlight=False,
    )


def print_others(console: Console, rounds: Sequence[Round]) -> None:
    """Whether anybody else was computing."""
    worst = max(one.other_cores for one in rounds)
    if worst > NOTEWORTHY_CORES:
        console.print(f"\n  other processes used up to {worst:.2f} cores: not a quiet machine", highlight=False)
