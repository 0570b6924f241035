"""Kinds of GPU that kernels are configured for."""

from __future__ import annotations

from enum import Enum


class Architecture(Enum):
    """What matters for the size of tiles."""

    LARGE = "large"
    """227 KiB of shared memory for a block, products read from there: sm_90, sm_100, sm_103."""
    COMPACT = "compact"
    """At least 99 KiB, products in registers: sm_80 to sm_89, sm_120."""
    CDNA = "cdna"
    """64 KiB: AMD's gfx942. Compiled for in tests, never run."""


def architecture_of(major: int, hip: bool = False) -> Architecture:
    """By the major number of the compute capability. Raises ValueError for GPUs without bfloat16 (before sm_80)."""
    if hip:
        return Architecture.CDNA
    if major < 8:
        raise ValueError(f"GPUs of compute capability {major}.x are not supported: 8.0 is needed")
    return Architecture.LARGE if major in (9, 10) else Architecture.COMPACT
