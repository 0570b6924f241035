"""The cache of compiled functions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ringserve.kernels.cpu.compiled import source_digest

PROGRAM = """
import numpy as np
from ringserve.kernels.cpu.compiled import is_kept
from ringserve.kernels.cpu.quantize import quantize_rows
kept = is_kept(quantize_rows)
x, q, scales = np.ones(64, np.float32), np.empty(64, np.uint8), np.empty(1, np.float32)
quantize_rows(x.ctypes.data, 1, 64, 64, q.ctypes.data, scales.ctypes.data)
stats = quantize_rows.stats
print(kept, is_kept(quantize_rows), sum(stats.cache_misses.values()), sum(stats.cache_hits.values()))
"""


def _run() -> str:
    command = [sys.executable, "-P", "-c", PROGRAM]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_second_process_compiles_nothing() -> None:
    _run()
    assert _run() == "True True 0 1"


def test_the_stamp_covers_every_file_of_the_package(tmp_path: Path) -> None:
    def stamp() -> bytes:
        source_digest.cache_clear()
        return source_digest(tmp_path)

    (tmp_path / "a.py").write_text("1")
    stamps = [stamp()]
    (tmp_path / "b.py").write_text("2")
    stamps.append(stamp())
    (tmp_path / "b.py").write_text("3")
    stamps.append(stamp())
    (tmp_path / "b.py").rename(tmp_path / "c.py")
    stamps.append(stamp())
    assert len(set(stamps)) == 4
    assert stamp() == stamps[-1]
