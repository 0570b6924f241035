"""Results of ``ringserve bench ipc`` as tables for a terminal, Markdown for the documentation, and a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from ringserve.bench.ipc_links import BASELINE
from ringserve.bench.ipc_results import Bound, Idle, Latency, Rate, Results


class Sheet(msgspec.Struct, frozen=True):
    """One table, before it is laid out."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


_FAMILIES = {
    "busy": "One way, microseconds: the receiver has just been busy",
    "idle": "One way, microseconds: a millisecond between messages",
    "uvloop": "One way, microseconds: both ends on uvloop",
    "small": "Six hops through four processes and back, microseconds: 64 bytes",
    "engine": "Six hops through four processes and back, microseconds: the engine's messages, batch of 32",
}
_RATES = {
    "throughput": "Saturated: bursts of 32",
    "uvloop": "Saturated: both ends on uvloop",
    "small": "Six hops, 32 in flight: 64 bytes",
    "engine": "Six hops, 32 in flight: the engine's messages, batch of 32",
}


WIDE = 150
"""Characters of a terminal that takes all sizes side by side."""


def sheets(results: Results, wide: bool) -> Iterator[Sheet]:
    """All tables; ``wide``: the sizes side by side."""
    for family, title in _FAMILIES.items():
        cells = [cell for cell in results.latencies if cell.family == family]
        for placement in dict.fromkeys(cell.placement for cell in cells):
            chosen = [cell for cell in cells if cell.placement == placement]
            layout = _latency_sheet if wide else _long_latency_sheet
            yield layout(f"{title}, {_PLACES[placement]}", chosen)
    for family, title in _RATES.items():
        rates = [cell for cell in results.rates if cell.family == family]
        if rates:
            yield _rate_sheet(title, rates)
    if results.bounds:
        yield _bound_sheet(results.bounds)
    if results.idle:
        yield _idle_sheet(results.idle)
    if results.targets:
        rows = tuple((t.what, f"{t.measured:.3g}", f"{t.goal:g}", "yes" if t.met else "no") for t in results.targets)
        yield Sheet("Targets", ("", "measured", "goal", "met"), rows)


_PLACES = {"unpinned": "processes not pinned", "shared": "on one core", "separate": "on two cores"}


def size_name(size: int) -> str:
    """512 KiB, 64 B; empty for the engine's messages."""
    if size == 0:
        return ""
    return f"{size // 1024} KiB" if size >= 1024 else f"{size} B"


def _latency_sheet(title: str, cells: Sequence[Latency]) -> Sheet:
    sizes = list(dict.fromkeys(cell.size for cell in cells))
    columns = [""]
    for size in sizes:
        columns += [f"{size_name(size)} p50".strip(), "p99", "p99.9", f"to {BASELINE}"]
    rows = []
    for transport in dict.fromkeys(cell.transport for cell in cells):
        row = [transport]
        for size in sizes:
            cell = next(c for c in cells if c.transport == transport and c.size == size)
            row += [_number(cell.p50_us), _number(cell.p99_us), _number(cell.p999_us), _ratio(cell.ratio)]
        rows.append(tuple(row))
    return Sheet(title, tuple(columns), tuple(rows))


def _long_latency_sheet(title: str, cells: Sequence[Latency]) -> Sheet:
    rows = tuple(
        (
            cell.transport,
            size_name(cell.size),
            _number(cell.p50_us),
            _number(cell.p99_us),
            _number(cell.p999_us),
            _ratio(cell.ratio),
        )
        for cell in sorted(cells, key=lambda cell: cell.size)
    )
    return Sheet(title, ("", "message", "p50", "p99", "p99.9", f"to {BASELINE}"), rows)


def _rate_sheet(title: str, cells: Sequence[Rate]) -> Sheet:
    columns = ("", "message", "per second", f"to {BASELINE}", "CPU us", f"to {BASELINE}", "doorbells")
    rows = tuple(
        (
            cell.transport,
            size_name(cell.size),
            f"{cell.per_s:,.0f}",
            _ratio(cell.ratio),
            _optional(cell.cpu_us, _number),
            _ratio(cell.cpu_ratio),
            _optional(cell.doorbells, lambda value: f"{value:.4f}"),
        )
        for cell in sorted(cells, key=lambda cell: cell.size)
    )
    return Sheet(title, columns, rows)


def _bound_sheet(bounds: Sequence[Bound]) -> Sheet:
    columns = ("", "CPU us a round trip", "per second", f"to {BASELINE}")
    rows = tuple(
        (_RATES[bound.family].split(": ")[-1], _number(bound.cpu_us), f"{bound.per_s:,.0f}", _ratio(bound.ratio))
        for bound in bounds
    )
    return Sheet("Six hops with a transport that costs nothing: encoding, decoding, building", columns, rows)


def _idle_sheet(cells: Sequence[Idle]) -> Sheet:
    rows = tuple((cell.transport, f"{cell.cpu_ms:.3f}", str(cell.context_switches)) for cell in cells)
    return Sheet(f"Waiting for {cells[0].seconds:g} s", ("", "CPU ms", "context switches"), rows)


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _optional(value: float | None, text: Callable[[float], str]) -> str:
    return "-" if value is None else text(value)


def print_results(console: Console, results: Results) -> None:
    """To a terminal."""
    for sheet in sheets(results, console.width >= WIDE):
        console.print(sheet.title, style="bold", highlight=False)
        table = Table(box=None, padding=(0, 2, 0, 0))
        for number, column in enumerate(sheet.columns):
            table.add_column(column, justify="left" if number == 0 else "right", no_wrap=number > 0)
        for row in sheet.rows:
            table.add_row(*row, style="bold" if row[0] == "ring" else None)
        console.print(table)
        console.print()
    for note in results.notes:
        console.print(f"  {note}", markup=False, highlight=False)


def markdown(results: Results, machine: str) -> str:
    """For documentation."""
    lines = [machine, ""]
    lines += [f"* {note}" for note in results.notes]
    for sheet in sheets(results, wide=True):
        lines += ["", f"**{sheet.title}**", "", _row(sheet.columns)]
        lines.append("|---|" + "---:|" * (len(sheet.columns) - 1))
        lines += [_row(row) for row in sheet.rows]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def plot(path: Path, results: Results, title: str) -> None:
    """p50 (bar) and p99 (whisker) of one-way latency for each size, and CPU per message."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, and not always installed
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 8), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(2, 2).flat
    chosen = (("busy", "unpinned"), ("busy", "separate"), ("idle", "unpinned"))
    for axis, (family, placement) in zip(axes, chosen, strict=False):
        cells = [cell for cell in results.latencies if (cell.family, cell.placement) == (family, placement)]
        bars = [(c.transport, c.size, c.p50_us, max(0.0, c.p99_us - c.p50_us)) for c in cells]
        _bars(axis, bars, f"{_FAMILIES[family].split(': ')[-1]}, {_PLACES[placement]}: one way, us (p50, line to p99)")
    rates = [cell for cell in results.rates if cell.family == "throughput" and cell.cpu_us is not None]
    _bars(axes[3], [(c.transport, c.size, c.cpu_us or 0.0, 0.0) for c in rates], "CPU us per message, both processes")
    figure.savefig(path)


def _bars(axis: object, bars: Sequence[tuple[str, int, float, float]], title: str) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axis, Axes)
    axis.set_title(title, fontsize=9)
    if not bars:
        return
    sizes = sorted({size for _, size, _, _ in bars})
    transports = list(dict.fromkeys(transport for transport, _, _, _ in bars))
    width = 0.8 / len(transports)
    for number, transport in enumerate(transports):
        own = {size: (height, rise) for name, size, height, rise in bars if name == transport}
        at = [sizes.index(size) + (number - (len(transports) - 1) / 2) * width for size in own]
        heights, rises = zip(*own.values(), strict=True)
        axis.bar(at, heights, width, yerr=([0.0] * len(at), rises), label=transport, error_kw={"linewidth": 0.7})
    axis.set_xticks(range(len(sizes)), [size_name(size) for size in sizes])
    axis.set_yscale("log")
    axis.grid(axis="y", alpha=0.3)
    axis.legend(fontsize=7, ncols=2)
