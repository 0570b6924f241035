"""Compile kernels for a GPU that is not there: the real launchers run on CPU tensors and only compile.

    with compile_only(SM_90) as compiled:
        paged_decode(...)
    print(compiled[0].registers, compiled[0].shared)

Each launch is specialised exactly as a real one would be (alignment, ones, warps, stages). Triton must not be in its
interpreter.
"""

# Patches private parts of a package without types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import gc
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

SM_80 = GPUTarget("cuda", 80, 32)
SM_90 = GPUTarget("cuda", 90, 32)
SM_100 = GPUTarget("cuda", 100, 32)
GFX942 = GPUTarget("hip", "gfx942", 64)

SHARED_MEMORY: dict[int | str, int] = {80: 166_912, 90: 232_448, 100: 232_448, "gfx942": 65_536}
"""Bytes that one block may have."""

TENSOR_MEMORY = 512
"""Columns that one block of sm_100 may have."""


@dataclass(frozen=True)
class Compiled:
    """What one launch compiled to."""

    name: str
    target: GPUTarget
    asm: dict[str, Any]
    shared: int
    """Bytes."""
    registers: int
    stack: int
    """Bytes of local memory of a thread: spilled registers."""
    variant: str
    """Equal for launches of the same code."""

    tensor_memory: int
    """Columns."""
    scratch: int
    """Bytes of the device's memory that a launch asks its caller for."""

    @property
    def fits(self) -> bool:
        """Whether the target has so much shared and tensor memory; no launcher here has scratch to give."""
        shared_fits = self.shared <= SHARED_MEMORY[self.target.arch]
        return shared_fits and self.tensor_memory <= TENSOR_MEMORY and self.scratch == 0

    def buffers(self, rows: int, columns: int) -> list[int]:
        """How many buffers each pipelined load of such a tile has, either way round, from the compiler's own code."""
        shape = rf"(?:{rows}x{columns}|{columns}x{rows})x[a-z]"
        allocation = rf"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x{shape}"
        return [int(count) for count in re.findall(allocation, self.asm["ttgir"])]


class _Driver:
    """What Triton asks of a driver before it launches."""

    launcher_cls = None

    def __init__(self, target: GPUTarget) -> None:
        self._target = target
        properties = {"max_shared_mem": SHARED_MEMORY[target.arch], "multiprocessor_count": 132}
        self.utils = SimpleNamespace(get_device_properties=lambda device: properties)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def _resources(kernel: Any, target: GPUTarget) -> tuple[int, int]:
    """(registers, bytes of stack) of a compiled kernel."""
    if target.backend == "hip":
        text = kernel.asm["amdgcn"]
        return tuple(  # type: ignore[return-value]
            int(re.search(rf"\.{key}:?\s+(\d+)", text)[1])  # type: ignore[index]
            for key in ("vgpr_count", "private_segment_fixed_size")
        )
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [program, "-res-usage", file.name], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert match is not None, usage
    return int(match[1]), int(match[2])


def _forget() -> None:
    for function in gc.get_objects():
        if issubclass(type(function), JITFunction):  # isinstance would run code of lazy objects
            function.device_caches.clear()


@contextmanager
def compile_only(target: GPUTarget, *, resources: bool = True) -> Iterator[list[Compiled]]:
    """Launches inside compile for ``target`` and are recorded; ``resources``: with registers and stack, which takes
    long where there are many launches."""
    run, active = JITFunction.run, driver._active
    compiled: list[Compiled] = []

    def record(self, *args, grid, warmup=False, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append(
            Compiled(
                name=kernel.metadata.name,
                target=target,
                asm=kernel.asm,
                shared=kernel.metadata.shared,
                variant=kernel.hash,
                tensor_memory=getattr(kernel.metadata, "tmem_size", None) or 0,
                scratch=getattr(kernel.metadata, "global_scratch_size", None) or 0,
                **dict(zip(("registers", "stack"), _resources(kernel, target) if resources else (0, 0), strict=True)),
            )
        )
        return kernel

    _forget()
    driver.set_active(_Driver(target))
    JITFunction.run = record
    try:
        yield compiled
    finally:
        JITFunction.run = run
        driver._active = active
        _forget()
