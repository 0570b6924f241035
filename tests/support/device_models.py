"""Models on a device, built from tiny checkpoints. The device is the host with Triton's interpreter: start a process
with TRITON_INTERPRET=1 and repair the interpreter first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from checkpoints import SERVED, VOCAB_SIZE, make_checkpoint

from ringserve.config import ModelSource
from ringserve.engine.array_namespace import KVDType
from ringserve.engine.attention import ATTENTION_NAME
from ringserve.engine.gpu.decoder_weights import (
    gpu_shape,
    place_decoder,
    quantise_decoder,
    rotary_tables,
)
from ringserve.engine.gpu.device import HostDevice
from ringserve.engine.gpu.device_check import NUM_PAGES, compute_logits
from ringserve.engine.gpu.llama_model import LlamaModel, decoder_layers
from ringserve.engine.gpu.served_model import quantiser
from ringserve.engine.gpu.step_inputs import DeviceModel
from ringserve.engine.gpu.transformers_model import TransformersModel
from ringserve.engine.kv_pool import KVPool, LayerKV
from ringserve.engine.model_loader import LoadedModel, load_model

DEVICE = HostDevice()
MOST_POSITIONS = 128
LENGTHS = (13, 7)
STEPS = (((0, 6), (0, 5)), ((6, 12), (5, 6)), ((12, 13), (6, 7)))
PAGE_SIZE = 8
"""Of two sequences: chunks packed; a later chunk beside a decode; decodes alone. Short: a tile takes 30 ms."""
KV_DTYPES: Mapping[str, KVDType] = {"int8": "int8", "fp8": "float8"}


def tiny(name: str, **changes: Any) -> tuple[str, dict[str, Any]]:
    """A configuration of ``checkpoints.SERVED`` with two layers and a small vocabulary: a launch takes a
    millisecond."""
    config_class, arguments = SERVED[name]
    return config_class, {**arguments, "num_hidden_layers": 2, **changes}


FAMILY = {
    "llama": tiny("llama"),
    "llama-tied-biases": tiny("llama", tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama-rope-llama3": tiny("llama-rope-llama3", num_hidden_layers=1),
    "llama-rope-yarn": tiny("llama-rope-yarn", num_hidden_layers=1),
    "llama-multi-query": tiny("llama", num_hidden_layers=1, num_key_value_heads=1, head_dim=32),
    "qwen2": tiny("qwen2"),
    "qwen2-sliding": tiny("qwen2-sliding", max_window_layers=1),
    "qwen3": tiny("qwen3", head_dim=48),
    "mistral": tiny("mistral", num_hidden_layers=1),
}
"""What the compact forward computes."""

OTHERS = {
    "gemma2": tiny("gemma2"),
    "phi3": tiny("phi3", num_hidden_layers=1),
    "gpt-neox": tiny("gpt-neox", num_hidden_layers=1, num_attention_heads=2),
    "qwen3-24": tiny("qwen3", num_hidden_layers=1),  # heads of a size that the compact forward does not take
    "qwen3-moe": tiny("qwen3-moe"),
    "deepseek-v3": tiny("deepseek-v3", num_attention_heads=2, num_key_value_heads=2),
}
"""What transformers' own code computes."""


def load_tiny(directory: Path, name: str, dtype: str = "float32") -> LoadedModel:
    """A random checkpoint on the host."""
    path = directory / name
    if not path.exists():
        make_checkpoint(path, *{**FAMILY, **OTHERS}[name])
    return load_model(ModelSource(str(path), "directory", name), dtype, lambda stage, fraction: None)


def poisoned_pool(layers: Sequence[LayerKV], dtype: KVDType, page_size: int = PAGE_SIZE) -> KVPool:
    """Pages full of NaN (or of the largest codes with scales of NaN), but for page 0."""
    pool = KVPool(layers, NUM_PAGES, page_size, dtype, DEVICE.namespace)
    for index in range(len(layers)):
        for pages in (*pool.layer(index), *(pool.scales(index) or ())):
            pages[1:].fill_(torch.nan if pages.dtype.is_floating_point else 127)
    return pool


def decoder_model(
    loaded: LoadedModel, windows: Sequence[int], quantization: str = "none", kv_cache_dtype: str = "auto"
) -> LlamaModel:
    """The compact forward."""
    weights = place_decoder(loaded.model, gpu_shape(loaded.model), DEVICE.torch_device)
    rotary = rotary_tables(loaded.model, MOST_POSITIONS, DEVICE.torch_device)
    if quantization != "none":
        quantise_decoder(weights, loaded.model, quantiser(quantization, DEVICE), lambda part: None)
    pool = poisoned_pool(decoder_layers(weights), _kv_dtype(loaded, kv_cache_dtype))
    return LlamaModel(weights, rotary, windows, pool, DEVICE, 4)


def transformers_model(
    loaded: LoadedModel, modules: Sequence[torch.nn.Module], layers: Sequence[LayerKV], kv_cache_dtype: str = "auto"
) -> TransformersModel:
    """transformers' code with pages."""
    pool = poisoned_pool(layers, _kv_dtype(loaded, kv_cache_dtype))
    return TransformersModel(loaded.model, modules, pool, DEVICE, 4)


def _kv_dtype(loaded: LoadedModel, kv_cache_dtype: str) -> KVDType:
    own: KVDType = "float32" if loaded.dtype == "float32" else "bfloat16"
    return KV_DTYPES.get(kv_cache_dtype, own)


def sequences_of(seed: int = 0) -> list[torch.Tensor]:
    """Token ids, ``LENGTHS`` of them."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]


def own_logits(loaded: LoadedModel, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """transformers' own eager pass, each sequence alone."""
    model: Any = loaded.model
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}.values()
    for config in configs:
        config._attn_implementation = "eager"
    try:
        with torch.inference_mode():
            return [model(input_ids=ids[None], use_cache=False).logits[0] for ids in sequences]
    finally:
        for config in configs:
            config._attn_implementation = ATTENTION_NAME


def served_logits(model: DeviceModel, sequences: Sequence[torch.Tensor], padding: int = 0) -> list[torch.Tensor]:
    """Through pages, by ``STEPS``."""
    return compute_logits(model, sequences, PAGE_SIZE, DEVICE.torch_device, STEPS, padding)


@dataclass(frozen=True)
class Difference:
    """Of logits."""

    largest: float
    """As a part of the largest logit."""
    spread: float
    """Root mean square, as a part of the logits' spread."""


def difference(expected: Sequence[torch.Tensor], got: Sequence[torch.Tensor]) -> Difference:
    """Of the logits of some sequences; NaN in any is NaN."""
    right, left = torch.cat(list(expected)).double(), torch.cat(list(got)).double()
    error = right - left
    return Difference(float(error.abs().max() / right.abs().max()), float(error.square().mean().sqrt() / right.std()))
