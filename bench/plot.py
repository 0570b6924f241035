"""Throughput against latency as a picture. matplotlib is an extra: ``pip install 'ringserve[bench]'``."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from ringserve.bench.measure import Run
from ringserve.options import OptionError

FORMATS = (".png", ".svg")


def check_plot(path: Path | None) -> None:
    """A plot that cannot be drawn should fail before the run.

    Raises:
        OptionError: matplotlib is missing, or the format is unknown.
    """
    if path is None:
        return
    if path.suffix not in FORMATS:
        raise OptionError(f"--plot: {path}: the name must end in .png or .svg")
    if importlib.util.find_spec("matplotlib") is None:
        raise OptionError("--plot: needs matplotlib: pip install 'ringserve[bench]'")


def plot(path: Path, series: Mapping[str, Sequence[Run]], title: str) -> None:
    """One line for each server, one point for each run: output tokens/s against TTFT and TPOT (p50, up to p99).

    Raises:
        OptionError: it cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, and not always installed
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_literal(title), fontsize=10)
    for axes, (name, kind) in zip(figure.subplots(1, 2), (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms")), strict=True):
        for label, runs in series.items():
            points = []
            for run in runs:
                if (summary := getattr(run.metrics, kind)) is not None:
                    points.append((run.metrics.output_tokens_per_s, summary.p50, summary.p99, _value(run)))
            if not points:
                continue
            x, p50, p99, values = zip(*points, strict=True)
            rise = [high - low for low, high in zip(p50, p99, strict=True)]
            axes.errorbar(x, p50, yerr=[[0.0] * len(x), rise], marker="o", capsize=3, label=_literal(label))
            for at, height, value in zip(x, p50, values, strict=True):
                axes.annotate(value, (at, height), textcoords="offset points", xytext=(5, -10), fontsize=8)
        axes.set_xlabel("output tokens/s")
        axes.set_ylabel(f"{name}, ms (p50, bar to p99)")
        axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
        axes.set_xlim(0, axes.get_xlim()[1] * 1.05)
        axes.grid(alpha=0.3)
        if axes.has_data() and len(series) > 1:
            axes.legend()
    try:
        figure.savefig(path)
    except OSError as error:
        raise OptionError(f"--plot: {path}: {error.strerror}") from None


def _literal(text: str) -> str:
    """Names are no formulas."""
    return text.replace("$", r"\$")


def _value(run: Run) -> str:
    point = run.point
    if point.concurrency is not None:
        return str(point.concurrency)
    return f"{point.rate:g}/s" if point.rate is not None else ""
