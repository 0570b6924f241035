"""These tests run kernels on the CPU: ``interpreted_pytest`` starts them in a process whose Triton interprets."""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def interpreter() -> None:
    """Repaired, and one thread: tensors are tiny."""
    from triton_interpreter import repair

    repair()
    torch.set_num_threads(1)
