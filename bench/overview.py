"""One picture of kept results: ringserve, other servers and plain transformers, output tokens/s by requests at once.

    python -P -m ringserve.bench.overview bench/results/overview.svg bench/results/decode-2-threads.json \
        bench/results/compare-bf16-1.json bench/results/compare-bf16-8.json bench/results/compare-bf16-32.json
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ringserve.bench.module_command import module_parser, run_module
from ringserve.bench.report import check_writable
from ringserve.options import OptionError


def draw(picture: Path, decoded: Path, compared: Sequence[Path]) -> None:
    """Draw ``picture`` from a result of ``bench.decode`` and some of ``bench compare``, each at points of its own."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, and not always installed
    from matplotlib.figure import Figure

    rates: dict[str, dict[int, float]] = {}
    for entry in (entry for path in compared for entry in json.loads(path.read_text())["summary"]):
        rates.setdefault(entry["server"], {})[entry["point"]["concurrency"]] = entry["medians"]["output_tokens_per_s"]
    plain = json.loads(decoded.read_text())["medians"]["transformers"]
    points = sorted({point for series in rates.values() for point in series})
    # It answers one request after the other, however many wait.
    rates["transformers generate, sequential"] = dict.fromkeys(points, plain)

    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    width = 0.8 / len(rates)
    for index, (name, series) in enumerate(rates.items()):
        left = [position + (index - (len(rates) - 1) / 2) * width for position in range(len(points))]
        bars = axes.bar(left, [series[point] for point in points], width, label=name)
        axes.bar_label(bars, fmt="%.0f", fontsize=8)
    axes.set_xticks(range(len(points)), [str(point) for point in points])
    axes.set_xlabel("requests at once")
    axes.set_ylabel("output tokens/s")
    axes.legend()
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(picture)


def main() -> int:
    """Read the results and draw them."""
    parser = module_parser(__file__, __doc__)
    parser.add_argument("picture", type=Path, help="the file to draw")
    parser.add_argument("decoded", type=Path, help="a result of `bench.decode`")
    parser.add_argument("compared", type=Path, nargs="+", help="results of `ringserve bench compare`")
    options = parser.parse_args()
    check_writable(options.picture, "picture")
    try:
        draw(options.picture, options.decoded, options.compared)
    except OSError as error:
        raise OptionError(f"{error.filename}: {error.strerror}") from None
    except (ValueError, LookupError) as error:  # not JSON, or another benchmark's
        raise OptionError(f"no result of these benchmarks: {type(error).__name__}: {error}") from None
    return 0


if __name__ == "__main__":
    run_module(main)
