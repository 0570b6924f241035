"""Small random checkpoints of the Llama family, and runners on the fast path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from checkpoints import make_checkpoint
from runners import RecordingSampler

from ringserve.config import ModelSource
from ringserve.engine.fast_decoder import FastDecoder
from ringserve.engine.fast_forward import FastForward
from ringserve.engine.fast_model import FastModel
from ringserve.engine.fast_startup import prepare_fast
from ringserve.engine.kv_pool import KVPool
from ringserve.engine.model_loader import LoadedModel, load_model
from ringserve.engine.model_runner import ModelRunner
from ringserve.kernels.cpu.features import Level

SMALL: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

FAMILY: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SMALL),
    "llama-tied-biases": (
        "LlamaConfig",
        {**SMALL, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 32},
    ),
    "llama-rope-llama3": ("LlamaConfig", {**SMALL, "head_dim": 80, "rope_parameters": LLAMA3_ROPE}),
    "llama-multi-query": ("LlamaConfig", {**SMALL, "num_attention_heads": 8, "num_key_value_heads": 1}),
    "llama-every-head": ("LlamaConfig", {**SMALL, "num_key_value_heads": 4, "head_dim": 96}),
    "mistral-window": ("MistralConfig", {**SMALL, "sliding_window": 9, "head_dim": 128}),
    "qwen2": ("Qwen2Config", {k: v for k, v in SMALL.items() if k != "head_dim"} | {"hidden_size": 128}),
    "qwen2-sliding": (
        "Qwen2Config",
        {k: v for k, v in SMALL.items() if k != "head_dim"}
        | {"hidden_size": 128, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {**SMALL, "head_dim": 128}),
    "qwen3-wide": ("Qwen3Config", {**SMALL, "head_dim": 256, "tie_word_embeddings": True}),
}
"""What the fast path serves: the configuration class and its arguments."""


def load_small(directory: Path, name: str) -> LoadedModel:
    """A random checkpoint of ``FAMILY``, loaded in bfloat16."""
    path = make_checkpoint(directory / name, *FAMILY[name])
    return load_model(ModelSource(str(path), "directory", name), "bfloat16", lambda stage, fraction: None)


def prepare(loaded: LoadedModel, quantization: str = "none", level: Level | None = None) -> FastModel:
    """Packed and checked."""
    return prepare_fast(loaded, quantization, 64, 2048, 1 << 40, lambda stage, fraction: None, level)


@dataclass
class FastBench:
    """Everything a test drives."""

    pool: KVPool
    sampler: RecordingSampler
    decoder: FastDecoder
    runner: ModelRunner


def make_fast_bench(model: FastModel, *, page_size: int, num_pages: int, num_threads: int = 1) -> FastBench:
    """A runner on pages full of NaN: whatever is read without having been written shows."""
    pool = KVPool(model.layers, num_pages, page_size, "bfloat16")
    for index in range(len(model.layers)):
        for pages in pool.layer(index):
            pages.fill_(torch.nan)
    decoder = model.decoder(pool, num_threads, 64)
    sampler = RecordingSampler(model.weights.shape.vocab_size, (), 64)
    return FastBench(pool, sampler, decoder, ModelRunner(FastForward(decoder), page_size, sampler))
