"""What the machine is, and every kernel against float64 in parallel processes."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import torch

from ringserve.bench.gpu.device import Device

PACKAGES = (
    "torch",
    "triton",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "transformers",
    "numpy",
    "msgspec",
    "starlette",
    "uvicorn",
)

CASES = {
    "prefill": 140,
    "decode": 140,
    "far_prefill": 14,
    "far_decode": 14,
    "rope_kv_write": 140,
    "casts": 2,
    "quantize": 2,
    "add_rms_norm": 60,
    "head_rms_norm": 40,
    "silu_mul": 40,
    "page_copy": 40,
    "quantized_linear": 60,
    "philox": 4,
    "sampling": 200,
    "logprobs": 80,
}
"""Cases of each family on a device, those first that take longest to compile, cut into parts of PART for as many
processes as there are cores."""

PART = 20

KERNEL_SECONDS = 135.0
"""Parts that are not done by then have failed; what the others found is reported."""

MOST_PROCESSES = 14
"""A gigabyte of the host's memory each, and up to 17 of the device's for pages that lie far apart."""

DRY_CASES = (
    ("decode", 4, 3),
    ("prefill", 4, 3),
    ("rope_kv_write", 4, 3),
    ("quantize", 0, 2),
    ("add_rms_norm", 1, 2),
    ("page_copy", 0, 2),
    ("philox", 0, 1),
    ("sampling", 1, 1),
)
"""(family, first seed, number) without bfloat16 products, on which the stock interpreter is wrong."""


def describe_environment(device: Device) -> dict[str, object]:
    """Versions and the device's properties."""
    found: dict[str, object] = {"python": platform.python_version(), "cores": len(os.sched_getaffinity(0))}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    if not device.dry:
        properties = torch.cuda.get_device_properties(0)
        found["device"] = properties.name
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["multiprocessors"] = properties.multi_processor_count
        found["memory"] = properties.total_memory
        found["cuda"] = torch.version.cuda
        cupy = import_module("cupy")
        found["cupy_driver"] = cupy.cuda.runtime.driverGetVersion()
        if not cupy.cuda.is_available():
            raise AssertionError("CuPy sees no device")
    return found


def check_kernels(device: Device) -> dict[str, object]:
    """All families of ``kernel_cases``; compiling is most of it, so that it also warms Triton's cache."""
    if device.dry:
        parts = [[f"{name}:{first}:{number}"] for name, first, number in DRY_CASES]
        parts = [[part for group in parts for part in group]]
    else:
        parts = [
            [f"{name}:{first}:{min(PART, total - first)}"]
            for name, total in CASES.items()
            for first in range(0, total, PART)
        ]
    where = "cpu" if device.dry else "cuda"
    command = [sys.executable, "-P", "-m", "ringserve.bench.kernel_cases.run", where]
    end = time.monotonic() + KERNEL_SECONDS

    def failure(part: list[str]) -> str | None:
        try:
            result = subprocess.run(
                [*command, *part],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=max(end - time.monotonic(), 0.1),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"{' '.join(part)}: not done"
        return f"{' '.join(part)}: {result.stdout.strip()[-600:]}" if result.returncode != 0 else None

    with ThreadPoolExecutor(max(1, min(len(os.sched_getaffinity(0)), MOST_PROCESSES))) as pool:
        failures = [line for line in pool.map(failure, parts) if line is not None]
    if failures:
        raise AssertionError(f"{len(failures)} of {len(parts)} parts failed: " + " | ".join(failures)[:4000])
    return {"parts": len(parts), "cases": sum(int(part.rpartition(":")[2]) for group in parts for part in group)}
