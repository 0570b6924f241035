"""What the terminal shows while a server starts, and the line it ends with."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

ALMOST = 0.999


class StartDisplay:
    """A progress bar on a terminal; one line for each stage elsewhere."""

    def __init__(self, model: str) -> None:
        console = Console(stderr=True)
        self._stage = ""
        self._bar: Progress | None = None
        self._open = True
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console, transient=True
            )
            self._task = self._bar.add_task(f"starting {model}", total=1.0)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def update(self, stage: str, fraction: float) -> None:
        """``stage`` is done to ``fraction`` (0 to 1)."""
        if not self._open:
            return
        if self._bar is not None:
            # A task that was complete once stops its clock for good; this one has further stages.
            self._bar.update(self._task, description=stage, completed=min(fraction, ALMOST))
        elif stage != self._stage:
            print(f"ringserve: {stage} ...", file=sys.stderr, flush=True)
        self._stage = stage

    def close(self) -> None:
        """Take the bar away."""
        self._open = False
        if self._bar is not None:
            self._bar.stop()


def ready_line(model: str, summary: Mapping[str, str | int | float]) -> str:
    """URL, model, how it is computed, KV capacity and time taken, in one line."""
    numbers = summary["quantization"] if summary["quantization"] != "none" else summary["dtype"]
    path = f"{summary['model_impl']} path" + (f" ({summary['instructions']})" if summary["instructions"] else "")
    # Said where it is not what the rest of the line would lead one to expect.
    kv = "" if summary["kv_dtype"] == summary["dtype"] else f" in {summary['kv_dtype']}"
    return (
        f"ringserve: serving {model} at {summary['url']} | {numbers} on {summary['device']}, {path}, "
        f"{summary['threads']} thread(s) | KV cache {summary['kv_tokens']:,} tokens{kv} | "
        f"ready in {age_of_process():.1f} s"
    )


def age_of_process() -> float:
    """Seconds since this process was executed."""
    with open("/proc/self/stat", encoding="ascii") as file:
        started_ticks = int(file.read().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
