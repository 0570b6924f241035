"""Policies side by side as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ringserve.simulate.figures import QUANTILES, Figures


def plot(path: Path, found: Sequence[Figures], title: str) -> None:
    """One point of load: TTFT and E2E as cumulative distributions. Several: their p50, bars to p99, over the load."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, and not always installed
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10)
    policies = list(dict.fromkeys(each.policy for each in found))
    several = len({each.point for each in found}) > 1
    for axes, name in zip(figure.subplots(1, 2), ("TTFT", "E2E"), strict=True):
        for policy in policies:
            runs = [each for each in found if each.policy == policy and each.completed]
            if several:
                _over_load(axes, runs, name, policy)
            for run in () if several else runs:
                seconds = [value / 1e3 for value in _quantiles(run, name)]
                axes.plot(seconds, [100 * part for part in QUANTILES], label=policy)
        axes.set_xlabel("output tokens/s" if several else f"{name}, s")
        axes.set_ylabel(f"{name}, s (p50, bar to p99)" if several else "requests, %")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if axes.has_data():
            axes.legend()
    figure.savefig(path)


def _quantiles(run: Figures, name: str) -> tuple[float, ...]:
    return run.ttft_quantiles_ms if name == "TTFT" else run.e2e_quantiles_ms


def _over_load(axes: object, runs: Sequence[Figures], name: str, policy: str) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    p50 = [_quantiles(run, name)[50] / 1e3 for run in runs]
    p99 = [_quantiles(run, name)[99] / 1e3 for run in runs]
    rise = [high - low for low, high in zip(p50, p99, strict=True)]
    x = [run.output_tokens_per_s for run in runs]
    axes.errorbar(x, p50, yerr=[[0.0] * len(x), rise], marker="o", capsize=3, label=policy)
