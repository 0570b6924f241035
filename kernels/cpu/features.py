"""Which instructions the kernels use: a level, chosen once and passed to every function that cares.

A level is a tuple, because compiled functions are specialised by the *type* of an argument: the empty tuple stands for
portable code (LLVM IR that every processor can run), a tuple of one for AVX-512 with BF16 dot products and VNNI. Code
that passes a level through needs no branch and is compiled (and cached) once for each level it is called with::

    @compiled
    def layer(level, w, x, ...):
        bf16_block(level, w, ...)

Arm and other processors take the portable level; it was not measured there.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import binding
from numba import types

Level = tuple[int, ...]

PORTABLE: Final[Level] = ()
AVX512: Final[Level] = (1,)

AVX512_FEATURES = ("avx512f", "avx512bw", "avx512vl", "avx512vnni", "avx512bf16")


def host_level() -> Level:
    """The best level of this processor."""
    features = binding.get_host_cpu_features()
    return AVX512 if all(features.get(name, False) for name in AVX512_FEATURES) else PORTABLE


def processor() -> str:
    """Which processor this is, with all that it can do: what results that were checked on it hold for."""
    features = ",".join(sorted(name for name, there in binding.get_host_cpu_features().items() if there))
    return f"{binding.get_host_cpu_name()} {features}"


def level_name(level: Level) -> str:
    """For logs."""
    return "avx512" if level else "portable"


def has_avx512(level: Any) -> bool:
    """For intrinsics: whether the numba type of a level argument is AVX512's."""
    return isinstance(level, types.BaseTuple) and len(level) == 1
