"""The Triton kernels against float64: in Triton's interpreter everywhere, on a device where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ringserve.bench.kernel_cases.run import FAMILIES

PROGRAM = Path(__file__).parents[2] / "support" / "interpreted_cases.py"

CASES = {
    "casts": 2,
    "decode": 105,
    "prefill": 105,
    "far_decode": 7,
    "far_prefill": 7,
    "rope_kv_write": 70,
    "quantize": 2,
    "add_rms_norm": 40,
    "head_rms_norm": 20,
    "silu_mul": 20,
    "page_copy": 20,
    "quantized_linear": 30,
    "philox": 3,
    "sampling": 70,
    "logprobs": 30,
}
"""In every run. Attention has seven combinations of type and KV format, one for each residue of a seed."""

MANY_CASES = {"decode": 700, "prefill": 700, "rope_kv_write": 700, "quantized_linear": 300, "sampling": 700}
"""In ``make test-all``: at least a hundred for each type."""


GROUPS = [
    ["decode", "far_decode"],
    ["prefill", "far_prefill"],
    ["rope_kv_write", "quantize", "page_copy"],
    ["sampling", "philox", "logprobs"],
    ["casts", "add_rms_norm", "head_rms_norm", "silu_mul", "quantized_linear"],
]
"""What shares a process: starting one takes longer than many a family."""


def _run(device: str, families: list[str], **environment: str) -> None:
    # The interpreter is chosen before Triton is imported, and its repairs must not reach other tests: own process.
    result = subprocess.run(
        [sys.executable, str(PROGRAM), device, *families],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]


def test_every_family_is_run() -> None:
    assert CASES.keys() == FAMILIES.keys() == {family for group in GROUPS for family in group}


@pytest.mark.parametrize("group", GROUPS, ids="-".join)
def test_equals_float64_in_the_interpreter(group: list[str]) -> None:
    _run("cpu", [f"{family}:0:{CASES[family]}" for family in group], TRITON_INTERPRET="1")


@pytest.mark.slow_all
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("family", MANY_CASES)
def test_many_cases_equal_float64_in_the_interpreter(family: str) -> None:
    _run("cpu", [f"{family}:1000:{MANY_CASES[family]}"], TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_equals_float64_on_a_device() -> None:
    _run("cuda", [f"{family}:0:{2 * number}" for family, number in CASES.items()])
