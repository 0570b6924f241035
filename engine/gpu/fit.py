"""Whether driver, torch, CuPy and Triton fit together for a GPU: one line where they do not.

``misfit`` judges collected facts; ``collect_facts`` looks at this machine without initialising a GPU it could not use.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
from dataclasses import dataclass

OLDEST_TRITON, NEWEST_TRITON = (3, 6), (3, 9)
"""The kernels were compiled on these."""

EXTRAS = {12: "cuda12", 13: "cuda13"}
"""Which of this package's extras belongs to a major version of CUDA."""


@dataclass(frozen=True)
class GpuFacts:
    """What a machine and an environment have."""

    driver_cuda: tuple[int, int] | None
    """The newest CUDA that the NVIDIA driver runs; None: there is no driver."""
    torch: str
    """torch's version."""
    torch_cuda: tuple[int, int] | None
    """The CUDA it was built with; None: a build without."""
    num_devices: int
    """That torch sees."""
    capability: tuple[int, int] | None
    """Of the first device."""
    torch_architectures: tuple[str, ...]
    """What torch was compiled for: sm_80, compute_90 ..."""
    cupy: tuple[tuple[int, str], ...]
    """(major version of CUDA, version) of each CuPy package."""
    triton: str | None


def misfit(facts: GpuFacts) -> str | None:
    """Why no GPU can be used, with the remedy; None where everything fits."""
    if facts.driver_cuda is None:
        return "there is no GPU here: no NVIDIA driver is installed"
    driver = ".".join(map(str, facts.driver_cuda))
    if facts.torch_cuda is None:
        return f"torch {facts.torch} is a build without CUDA; install the one for this driver with `make install`"
    major = facts.torch_cuda[0]
    built = ".".join(map(str, facts.torch_cuda))
    if major not in EXTRAS:
        return f"torch {facts.torch} was built for CUDA {built}; 12 or 13 is needed"
    if facts.driver_cuda[0] < major:
        return (
            f"the NVIDIA driver runs CUDA {driver} at most, and torch {facts.torch} was built for CUDA {built}; update "
            "the driver, or install the matching build of torch with `make install`"
        )
    if facts.num_devices == 0 or facts.capability is None:
        return "torch sees no GPU, though a driver is installed; look at nvidia-smi and CUDA_VISIBLE_DEVICES"
    capability = ".".join(map(str, facts.capability))
    if facts.capability[0] < 8:
        return f"the GPU has compute capability {capability}; 8.0 is needed"
    if not _compiled_for(facts.capability, facts.torch_architectures):
        return f"torch {facts.torch} has no code for a GPU of compute capability {capability}; install another build"
    return _misfit_of_cupy(facts, major) or _misfit_of_triton(facts)


def _misfit_of_cupy(facts: GpuFacts, major: int) -> str | None:
    extra = EXTRAS[major]
    if not facts.cupy:
        return f"CuPy is not installed; pip install 'ringserve[{extra}]'"
    if len(facts.cupy) > 1:
        return (
            "two CuPy packages are installed, which break one another; pip uninstall cupy-cuda12x cupy-cuda13x, then "
            f"pip install 'ringserve[{extra}]'"
        )
    (cupy_major, version), *_ = facts.cupy
    if cupy_major != major:
        return (
            f"CuPy {version} is for CUDA {cupy_major} and torch {facts.torch} for CUDA {major}; pip uninstall "
            f"cupy-cuda{cupy_major}x, then pip install 'ringserve[{extra}]'"
        )
    return None


def _misfit_of_triton(facts: GpuFacts) -> str | None:
    oldest, newest = (".".join(map(str, version)) for version in (OLDEST_TRITON, NEWEST_TRITON))
    if facts.triton is None:
        return f"Triton is not installed; pip install 'triton>={oldest},<={newest}.*'"
    if not OLDEST_TRITON <= (_pair(facts.triton) or (0, 0)) <= NEWEST_TRITON:
        return f"Triton {facts.triton} is not one of {oldest} to {newest}, which the kernels are for; install one"
    return None


def _compiled_for(capability: tuple[int, int], architectures: tuple[str, ...]) -> bool:
    """Code for sm_XY runs on the same X and at least Y; compute_XY, which the driver compiles, on anything newer."""
    if not architectures:  # an old torch does not say
        return True
    for name in architectures:
        kind, _, digits = name.partition("_")
        digits = digits.rstrip("af")
        if not digits.isdigit():
            continue
        version = (int(digits[:-1]), int(digits[-1]))
        if version <= capability and (kind == "compute" or version[0] == capability[0]):
            return True
    return False


def collect_facts() -> GpuFacts:
    """Of this machine and environment. torch is imported only where there is a driver: a CPU's start may do without."""
    driver = _driver_cuda()
    if driver is None:
        return GpuFacts(None, "", None, 0, None, (), (), None)
    import torch

    torch_cuda = _pair(torch.version.cuda) if torch.version.cuda is not None else None
    devices = 0
    capability: tuple[int, int] | None = None
    architectures: tuple[str, ...] = ()
    if driver is not None and torch_cuda is not None and torch_cuda[0] <= driver[0]:
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if devices:
            capability = torch.cuda.get_device_capability(0)
            architectures = tuple(torch.cuda.get_arch_list())
    cupy = [(major, _version(f"cupy-cuda{major}x")) for major in (11, 12, 13, 14)]
    return GpuFacts(
        driver_cuda=driver,
        torch=torch.__version__,
        torch_cuda=torch_cuda,
        num_devices=devices,
        capability=capability,
        torch_architectures=architectures,
        cupy=tuple((major, version) for major, version in cupy if version is not None),
        triton=_version("triton"),
    )


def _driver_cuda() -> tuple[int, int] | None:
    """As the driver's library says it; asking initialises nothing."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int(0)
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0 or number.value == 0:
        return None
    return number.value // 1000, number.value % 1000 // 10


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _pair(version: str) -> tuple[int, int] | None:
    """ "3.8.0+git" -> (3, 8)."""
    parts = version.split("+")[0].split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (IndexError, ValueError):
        return None
