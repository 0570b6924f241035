"""The Triton paged-decode kernel: in Triton's interpreter everywhere, on a device where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ringserve.kernels.paged_decode import MAX_SPLITS, choose_splits

CASES = Path(__file__).with_name("paged_decode_cases.py")


def _run(*arguments: str, **environment: str) -> None:
    # The interpreter is chosen before Triton is imported, and its repairs must not reach other tests: own process.
    result = subprocess.run(
        [sys.executable, str(CASES), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]


def test_equals_float64_in_the_interpreter() -> None:
    _run("cpu", "66", TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_equals_float64_on_a_device() -> None:
    _run("cuda", "300")


@pytest.mark.parametrize(
    ("batch", "kv_heads", "multiprocessors", "expected"),
    [(1, 8, 132, 64), (1, 8, 108, 32), (4, 8, 132, 16), (64, 8, 132, 1), (1, 1, 132, MAX_SPLITS)],
)
def test_splits_fill_the_device(batch: int, kv_heads: int, multiprocessors: int, expected: int) -> None:
    assert choose_splits(batch, kv_heads, multiprocessors) == expected


def test_the_cpu_path_does_not_import_triton() -> None:
    code = (
        "import sys, ringserve.kernels.paged_attention, ringserve.engine.sampler, ringserve.engine.kv_pool\n"
        "sys.exit(any(name.split('.')[0] in ('triton', 'cupy') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False, timeout=120).returncode == 0
