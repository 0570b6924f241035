"""What a start-up decides from the user's settings and the device's defaults, on every device alike: page size, number
formats, limits, and how many KV pages there are. Knows numbers and names only."""

from __future__ import annotations

from dataclasses import dataclass

from ringserve.config import ExecutorSettings
from ringserve.engine.devices import Device
from ringserve.engine.dtypes import DType
from ringserve.engine.kv_budget import KVBudget, check_page_size, plan_kv
from ringserve.engine.kv_dtype import choose_kv_dtype
from ringserve.engine.kv_layout import KVDType


@dataclass(frozen=True)
class ServingPlan:
    """Before a model is loaded."""

    device: str
    dtype: DType
    kv_dtype: KVDType
    quantization: str
    page_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len_asked: bool

    def budget(self, bytes_per_page: int, max_model_len: int, kv_cache_memory: int | None, free_bytes: int) -> KVBudget:
        """``kv_budget.plan_kv`` for this plan. Raises ModelError."""
        return plan_kv(
            bytes_per_page=bytes_per_page,
            page_size=self.page_size,
            max_num_seqs=self.max_num_seqs,
            max_model_len=max_model_len,
            max_model_len_asked=self.max_model_len_asked,
            kv_cache_memory=kv_cache_memory,
            free_bytes=free_bytes,
        )


def plan_serving(settings: ExecutorSettings, device: Device, dtype: DType) -> ServingPlan:
    """``dtype``: the model's. Raises ModelError with one line where something was asked for that cannot be."""
    config = settings.config
    return ServingPlan(
        device=device.name,
        dtype=dtype,
        kv_dtype=choose_kv_dtype(config.kv_cache_dtype, dtype, device.name),
        quantization=config.quantization,
        page_size=check_page_size(config.block_size or device.page_size),
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens or device.max_num_batched_tokens,
        max_model_len_asked=settings.max_model_len is not None,
    )
