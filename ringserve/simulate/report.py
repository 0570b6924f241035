"""Simulated runs as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from ringserve.bench.metrics import Metrics, Summary
from ringserve.simulate.figures import Figures, TenantService
from ringserve.simulate.rate_search import HighestRate
from ringserve.simulate.step_time import Calibration, Fit


def print_figures(console: Console, found: Sequence[Figures]) -> None:
    """One point of load: policies in columns."""
    table = _table(str(found[0].point))
    for figures in found:
        table.add_column(figures.policy, justify="right")
    rows = [_column(figures) for figures in found]
    for name in rows[0]:
        table.add_row(name, *(row.get(name, "-") for row in rows))
    console.print(table)
    for figures in found:
        for reason, count in figures.reasons.items():
            console.print(f"  {figures.policy}: {count} x {reason}", markup=False, highlight=False)
        if figures.tenants:
            _print_tenants(console, figures.policy, figures.tenants)
    console.print()


def _column(figures: Figures) -> dict[str, str]:
    f = figures
    column = {
        "requests completed": f"{f.completed}",
        "requests refused": f"{f.refused}",
        "duration, s": f"{f.duration_s:.2f}",
        "requests/s": f"{f.requests_per_s:.2f}",
        "output tokens/s": f"{f.output_tokens_per_s:.1f}",
    }
    for name, summary in (("TTFT", f.ttft_ms), ("ITL", f.itl_ms), ("TPOT", f.tpot_ms), ("E2E", f.e2e_ms)):
        for part in ("mean", "p50", "p90", "p99"):
            column[f"{name} {part}, ms"] = _number(_part(summary, part))
    if f.goodput is not None:
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in f.goodput.objectives_ms.items())
        column[f"goodput ({limits}), requests/s"] = f"{f.goodput.requests_per_s:.2f} = {f.goodput.part:.1%}"
    return column | {
        "prompt tokens from the cache": f"{f.cached_tokens} = {f.cache_hit_rate:.1%}",
        "preemptions (tokens lost)": f"{f.preemptions} ({f.preempted_tokens})",
        "steps (sequences in each)": f"{f.steps} ({f.mean_batch:.1f})",
        "executor busy": f"{f.busy:.1%}",
        "simulated in, s": f"{f.simulated_in_s:.2f}",
    }


def _print_tenants(console: Console, policy: str, tenants: Sequence[TenantService]) -> None:
    table = _table(f"tenants, {policy}")
    for name in ("completed", "prompt tokens", "output tokens", "share while all ask", "TTFT p50, ms", "E2E p50, ms"):
        table.add_column(name, justify="right")
    for tenant in tenants:
        table.add_row(
            tenant.tenant or "(none)",
            f"{tenant.completed} of {tenant.requests}",
            f"{tenant.prompt_tokens}",
            f"{tenant.output_tokens}",
            f"{tenant.output_share:.1%}",
            _p50(tenant.ttft_ms),
            _p50(tenant.e2e_ms),
        )
    console.print(table)


def print_rates(console: Console, found: Sequence[HighestRate]) -> None:
    """The highest rates."""
    table = _table("highest rate that keeps the objectives")
    for name in ("requests/s", "for", "runs"):
        table.add_column(name, justify="right")
    for each in found:
        rate = "none" if each.requests_per_s is None else f"{each.requests_per_s:.3g}"
        shown = f"at least {rate}" if each.unbounded else rate
        table.add_row(each.policy, shown, f"{each.part:.1%} of the requests", str(len(each.probes)))
    console.print(table)


def print_calibration(console: Console, calibration: Calibration, fit: Fit) -> None:
    """What was fitted and how well."""
    curve = calibration.step_time
    table = _table("step times")
    table.add_column("ms", justify="right")
    for knot, seconds in zip(curve.knots, curve.knot_seconds, strict=True):
        table.add_row(f"a step of {knot} tokens", f"{seconds * 1e3:.2f}")
    table.add_row("each sequence in it", f"{curve.per_sequence * 1e3:.3f}")
    table.add_row("each 1000 tokens of context", f"{curve.per_context_token * 1e6:.3f}")
    table.add_row("each million pairs of a prompt's tokens", f"{curve.per_pair * 1e9:.2f}")
    table.add_row("each request's way in and out", f"{calibration.request_overhead_s * 1e3:.2f}")
    console.print(table)
    worst = max(abs(error) for error in fit.errors)
    mean = sum(abs(error) for error in fit.errors) / len(fit.errors)
    console.print(
        f"  {len(fit.errors)} measurements; error {mean:.1%} on average, {worst:.1%} at worst\n", highlight=False
    )


def print_against(console: Console, figures: Figures, real: Metrics) -> None:
    """A simulated run beside a real one of the same load."""
    table = _table(f"{figures.point}, {figures.policy}")
    for name in ("simulated", "measured", "simulated / measured"):
        table.add_column(name, justify="right")
    pairs: list[tuple[str, float | None, float | None]] = [
        ("requests completed", figures.completed, real.completed),
        ("output tokens/s", figures.output_tokens_per_s, real.output_tokens_per_s),
    ]
    for name, ours, theirs in (
        ("TTFT", figures.ttft_ms, real.ttft_ms),
        ("ITL", figures.itl_ms, real.itl_ms),
        ("E2E", figures.e2e_ms, real.e2e_ms),
    ):
        for part in ("mean", "p50", "p99"):
            pairs.append((f"{name} {part}, ms", _part(ours, part), _part(theirs, part)))
    for name, one, other in pairs:
        known = one is not None and other is not None
        table.add_row(name, _number(one), _number(other), f"{one / other:.3f}" if known and one and other else "-")
    console.print(table)
    console.print()


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    return table


def _p50(summary: Summary | None) -> str:
    return "-" if summary is None else f"{summary.p50:.1f}"


def _part(summary: Summary | None, name: str) -> float | None:
    return None if summary is None else float(getattr(summary, name))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
