"""The examples of docs/offline.md run as they stand, one after the other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "offline.md"


@pytest.mark.slow
def test_the_examples() -> None:
    examples = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(examples) == 3
    done = subprocess.run(
        [sys.executable, "-P", "-"], input="\n".join(examples), capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second, third = "The capital of France is Paris", "\n0 '", "<|im_start|>assistant"
    assert first in done.stdout
    assert second in done.stdout
    assert third in done.stdout
