"""Tests that need Triton's interpreter, in a process of their own.

The interpreter is chosen before Triton is imported, and its repairs must not reach other tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

DIRECTORY = Path(__file__).parents[1] / "engine" / "gpu" / "interpreted"

MODELS = ("test_device_loader.py", "test_gpu_startup.py", "test_llama_model.py", "test_transformers_model.py")
"""Of the models; the others are of the runner. Two halves of about the same length."""


def all_files() -> list[str]:
    """Names of all of them."""
    return sorted(path.name for path in DIRECTORY.glob("test_*.py"))


def run_interpreted(name: str) -> None:
    """Run one file's tests; AssertionError with their output where one fails."""
    result = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(DIRECTORY / name)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
