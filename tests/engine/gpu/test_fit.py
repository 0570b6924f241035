"""One clear line where driver, torch, CuPy and Triton do not fit together."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from ringserve.engine.gpu.fit import GpuFacts, collect_facts, misfit

FITTING = GpuFacts(
    driver_cuda=(13, 0),
    torch="2.13.0+cu130",
    torch_cuda=(13, 0),
    num_devices=1,
    capability=(9, 0),
    torch_architectures=("sm_75", "sm_80", "sm_90", "sm_100", "compute_120"),
    cupy=((13, "14.2.0"),),
    triton="3.7.1",
)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"driver_cuda": (13, 2)},  # a newer driver runs what was built before
        {"torch_cuda": (12, 6), "cupy": ((12, "14.2.0"),)},
        {"driver_cuda": (12, 2), "torch_cuda": (12, 6), "cupy": ((12, "14.2.0"),)},  # the same major version
        {"capability": (8, 9)},
        {"capability": (12, 1)},
        {"torch_architectures": ()},
        {"triton": "3.6.0"},
        {"triton": "3.9.0+git12"},
    ],
)
def test_what_fits(changes: dict[str, Any]) -> None:
    assert misfit(replace(FITTING, **changes)) is None


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"driver_cuda": None}, "there is no GPU here: no NVIDIA driver"),
        ({"driver_cuda": None, "torch_cuda": None}, "no NVIDIA driver"),
        ({"torch": "2.13.0+cpu", "torch_cuda": None}, r"torch 2.13.0\+cpu is a build without CUDA; .* `make install`"),
        ({"torch_cuda": (11, 8)}, "built for CUDA 11.8; 12 or 13"),
        ({"driver_cuda": (12, 4)}, "driver runs CUDA 12.4 at most, .* built for CUDA 13.0; update"),
        ({"num_devices": 0, "capability": None}, "torch sees no GPU, though .* CUDA_VISIBLE_DEVICES"),
        ({"capability": (7, 5)}, "compute capability 7.5; 8.0 is needed"),
        ({"torch_architectures": ("sm_80", "sm_100a")}, "no code for a GPU of compute capability 9.0"),
        ({"capability": (8, 0), "torch_architectures": ("sm_86",)}, "no code for a GPU of compute capability 8.0"),
        ({"cupy": ()}, r"CuPy is not installed; pip install 'ringserve\[cuda13\]'"),
        ({"cupy": ((12, "14.2.0"), (13, "14.2.0"))}, r"two CuPy packages .* 'ringserve\[cuda13\]'"),
        (
            {"cupy": ((12, "14.2.0"),)},
            "CuPy 14.2.0 is for CUDA 12 and torch .* CUDA 13; pip uninstall cupy-cuda12x",
        ),
        ({"triton": None}, "Triton is not installed"),
        ({"triton": "3.5.1"}, "Triton 3.5.1 is not one of 3.6 to 3.9"),
        ({"triton": "3.10.0"}, "Triton 3.10.0 is not one of 3.6 to 3.9"),
    ],
)
def test_what_does_not_fit(changes: dict[str, Any], line: str) -> None:
    reason = misfit(replace(FITTING, **changes))
    assert reason is not None
    assert re.search(line, reason)
    assert "\n" not in reason


def test_facts_of_this_machine() -> None:
    """They can be collected anywhere, and are consistent; torch is left alone where there is no driver."""
    facts = collect_facts()
    if facts.driver_cuda is None:
        assert (facts.num_devices, facts.capability) == (0, None)
        assert "no NVIDIA driver" in str(misfit(facts))
    else:
        assert facts.torch


def test_without_a_driver_torch_is_not_imported() -> None:
    program = (
        "import sys\n"
        "from ringserve.engine.gpu import fit\n"
        "fit._driver_cuda = lambda: None\n"
        "print(fit.misfit(fit.collect_facts()), 'torch' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "there is no GPU here: no NVIDIA driver is installed False"
