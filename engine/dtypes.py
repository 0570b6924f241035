"""Which number format "auto" means on this machine. Knows no library."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ringserve.engine.model_error import ModelError

DType = Literal["float32", "bfloat16"]
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


def resolve_dtype(dtype: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> DType:
    """``auto``: bfloat16 where the processor computes in it, else float32."""
    match dtype:
        case "float32" | "bfloat16":
            return dtype
        case "auto":
            pass
        case _:
            raise ModelError(f"dtype {dtype} is not supported; choose auto, float32 or bfloat16 with --dtype")
    flags: set[str] = set()
    with cpuinfo.open() as lines:
        for line in lines:
            if line.startswith("flags"):
                flags.update(line.partition(":")[2].split())
                break
    return "bfloat16" if flags & BFLOAT16_FLAGS else "float32"
