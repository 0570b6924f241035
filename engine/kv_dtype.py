"""In which type the KV pool keeps keys and values: what was asked for, the model's type and the device decide."""

from __future__ import annotations

from typing import Literal

from ringserve.engine.kv_layout import KVDType
from ringserve.engine.model_error import ModelError

AskedKVDType = Literal["auto", "int8", "fp8"]


def choose_kv_dtype(asked: AskedKVDType, dtype: KVDType, device: str) -> KVDType:
    """``dtype``: the model's. Raises ModelError with one line where the device has no such type."""
    if asked == "auto":
        return dtype
    if asked == "int8":
        return "int8"
    if device == "cpu":
        raise ModelError("--kv-cache-dtype fp8 is for GPUs; use int8 on this CPU, or leave it out")
    return "float8"
