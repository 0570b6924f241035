"""The runner of a device with the real kernels, on the CPU in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "interpreted"
FILES = sorted(path.name for path in HERE.glob("test_*.py"))


def test_there_are_such_tests() -> None:
    assert len(FILES) >= 4


@pytest.mark.parametrize("name", FILES)
def test_in_the_interpreter(name: str) -> None:
    # The interpreter is chosen before Triton is imported, and its repairs must not reach other tests: own process.
    result = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / name)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
