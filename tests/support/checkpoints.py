"""Small random checkpoints of many architectures, in Hugging Face layout.

Weights are wide (standard deviation 0.08), so that logits differ by much more than rounding and a wrong mask, window or
rotary table shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

VOCAB_SIZE = 199
STD = 0.08
BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED: dict[str, Any] = {**BASE, "num_key_value_heads": 2}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}

SERVED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", GROUPED),
    "llama-rope-llama3": (
        "LlamaConfig",
        {
            **GROUPED,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "llama-rope-yarn": (
        "LlamaConfig",
        {
            **GROUPED,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen2": ("Qwen2Config", GROUPED),
    "qwen2-sliding": (
        "Qwen2Config",
        {**GROUPED, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3Config", {**GROUPED, "head_dim": 24}),
    "mistral": ("MistralConfig", {**GROUPED, "sliding_window": 8}),
    "gemma2": ("Gemma2Config", {**GROUPED, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24}),
    "gemma3": (
        "Gemma3TextConfig",
        {**GROUPED, "num_hidden_layers": 7, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24},
    ),
    "phi3": ("Phi3Config", {**GROUPED, "sliding_window": 8}),
    "gpt-neox": ("GPTNeoXConfig", BASE),
    "opt": (
        "OPTConfig",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "ffn_dim": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "max_position_embeddings": 256,
            "word_embed_proj_dim": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
    ),
    "mixtral": ("MixtralConfig", {**GROUPED, **EXPERTS, "num_local_experts": 4}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {**GROUPED, **EXPERTS, "head_dim": 16, "moe_intermediate_size": 48, "num_experts": 4, "decoder_sparse_step": 1},
    ),
    "deepseek-v3": (
        "DeepseekV3Config",
        {
            **BASE,
            **EXPERTS,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 48,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
        },
    ),
    "gpt-oss": (
        "GptOssConfig",
        {**GROUPED, **EXPERTS, "head_dim": 16, "sliding_window": 8, "num_local_experts": 4},
    ),
}
"""Served right: the configuration class and its arguments."""

REFUSED: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "lfm2": (
        "Lfm2Config",
        {**GROUPED, "layer_types": ["conv", "full_attention", "conv", "full_attention"], "conv_L_cache": 3},
        "mix tokens outside of attention",
    ),
    "qwen3-next": (
        "Qwen3NextConfig",
        {
            **GROUPED,
            **EXPERTS,
            "head_dim": 16,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 48,
            "num_experts": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
        "mix tokens outside of attention",
    ),
    "llama4": (
        "Llama4TextConfig",
        {
            **GROUPED,
            **EXPERTS,
            "intermediate_size_mlp": 96,
            "head_dim": 16,
            "num_local_experts": 4,
            "attention_chunk_size": 8192,
        },
        "differ from its own eager pass",
    ),
    "gpt-neo": (
        "GPTNeoConfig",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
        },
        "interface",
    ),
    "stablelm": ("StableLmConfig", BASE, "does not hand keywords on"),
    "bert": (
        "BertConfig",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
        "differ from its own eager pass",
    ),
    "bloom": ("BloomConfig", {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "n_layer": 2, "n_head": 4}, "interface"),
    "mamba": (
        "MambaConfig",
        {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "state_size": 8, "num_hidden_layers": 2},
        "interface",
    ),
}
"""Refused: the configuration class, its arguments, and a part of the reason."""


def make_checkpoint(directory: Path, config_class: str, arguments: Mapping[str, Any], seed: int = 0) -> Path:
    """Write a random checkpoint of the architecture; returns ``directory``."""
    import transformers

    config = getattr(transformers, config_class)(**arguments)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, STD, generator=generator)
            elif "sinks" in _name_of(model, parameter):
                parameter.normal_(0.0, 1.0, generator=generator)
    model.save_pretrained(directory)
    return directory


def _name_of(model: torch.nn.Module, wanted: torch.nn.Parameter) -> str:
    return next(name for name, parameter in model.named_parameters() if parameter is wanted)
