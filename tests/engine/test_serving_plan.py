"""What the user's settings and a device's defaults come to."""

from __future__ import annotations

import pytest

from ringserve.config import ExecutorConfig, ExecutorSettings, ModelSource
from ringserve.engine.devices import CPU, GPU
from ringserve.engine.model_error import ModelError
from ringserve.engine.serving_plan import ServingPlan, plan_serving


def settings_of(
    max_model_len: int | None = None, max_num_batched_tokens: int | None = None, **config: object
) -> ExecutorSettings:
    return ExecutorSettings(
        source=ModelSource("m", "directory", "m"),
        dtype="auto",
        max_model_len=max_model_len,
        max_num_seqs=4,
        max_num_batched_tokens=max_num_batched_tokens,
        config=ExecutorConfig(**config),  # type: ignore[arg-type]
    )


def test_what_was_not_asked_for_is_the_devices() -> None:
    assert plan_serving(settings_of(), CPU, "bfloat16") == ServingPlan(
        "cpu", "bfloat16", "bfloat16", "none", CPU.page_size, 4, CPU.max_num_batched_tokens, False
    )
    plan = plan_serving(settings_of(), GPU, "float32")
    assert (plan.device, plan.kv_dtype) == (GPU.name, "float32")
    assert (plan.page_size, plan.max_num_batched_tokens) == (GPU.page_size, GPU.max_num_batched_tokens)


def test_what_was_asked_for() -> None:
    settings = settings_of(100, 33, block_size=32, kv_cache_dtype="int8", quantization="int8")
    plan = plan_serving(settings, CPU, "float32")
    assert plan == ServingPlan("cpu", "float32", "int8", "int8", 32, 4, 33, True)
    with pytest.raises(ModelError, match="max_model_len 100 needs 40 bytes"):
        plan.budget(10, 100, 30, 1 << 30)


def test_what_cannot_be() -> None:
    with pytest.raises(ModelError, match="block_size 24"):
        plan_serving(settings_of(block_size=24), CPU, "bfloat16")
    with pytest.raises(ModelError, match="fp8 is for GPUs"):
        plan_serving(settings_of(kv_cache_dtype="fp8"), CPU, "bfloat16")


def test_a_reduced_length_is_said() -> None:
    plan = plan_serving(settings_of(block_size=32), CPU, "bfloat16")
    whole, reduced = plan.budget(10, 100, 40, 1 << 30), plan.budget(10, 100, 30, 1 << 30)
    assert (whole.max_model_len, whole.note) == (100, None)
    assert reduced.max_model_len == 96
    assert reduced.note == (
        "max_model_len is 96 instead of 100: the KV cache holds no longer sequence (--kv-cache-memory 40 would)"
    )
