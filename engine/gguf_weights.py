"""GGUF files: weights of the Llama family read straight into a transformers model, in seconds.

Names and dequantisation are transformers' own (``transformers.integrations.gguf``); the weights are bit-identical to
those of ``from_pretrained(gguf_file=...)``, which takes ten times as long. ``read_llama`` returns None for a file that
is not a plain Llama (other architectures, experts, scaled rotary embeddings): ``model_loader`` then converts it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ringserve.engine.model_error import ModelError, first_line

TENSOR_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
"""GGUF's name of a layer's tensor -> the module in ``LlamaDecoderLayer``."""

TOP_LEVEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

PLAIN_TYPES = (0, 1, 30)
"""ggml types that hold values, not blocks: float32, float16, bfloat16."""

END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""``tokenizer.ggml.*`` ids after which a model has nothing more to say: of a text, of a turn, of a message."""


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file's header."""

    path: Path
    architecture: str
    metadata: dict[str, Any]
    tensor_names: tuple[str, ...]

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a sequence, the file's eos first."""
        ids = (self.metadata.get(f"tokenizer.ggml.{key}") for key in END_KEYS)
        return tuple(dict.fromkeys(int(token) for token in ids if token is not None))


def open_gguf(path: Path) -> GgufFile:
    """Read the header. Raises ModelError where the file is not sound."""
    from transformers.integrations.gguf.reader import read_gguf_metadata

    try:
        metadata, names = read_gguf_metadata(str(path))
    except Exception as error:  # the reader meets damaged bytes with whatever struct, numpy or unicode raise
        raise ModelError(f"{path} is not a sound GGUF file ({first_line(error)}); download it again") from error
    return GgufFile(path, str(metadata["general.architecture"]), metadata, names)


def is_plain_llama(file: GgufFile) -> bool:
    """Whether the fast path knows every tensor and every setting of the file."""
    if file.architecture != "llama" or file.metadata.get("llama.expert_count"):
        return False
    if any(key.startswith("llama.rope.scaling.") and value != "none" for key, value in file.metadata.items()):
        return False
    return all(_target_name(name) is not None for name in file.tensor_names)


def _target_name(name: str) -> str | None:
    if name in TOP_LEVEL_NAMES:
        return TOP_LEVEL_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in TENSOR_NAMES and parts[3] in ("weight", "bias"):
        return f"model.layers.{parts[1]}.{TENSOR_NAMES[parts[2]]}.{parts[3]}"
    return None


def llama_config(file: GgufFile) -> Any:
    """The ``LlamaConfig`` that the file's metadata describe."""
    from transformers.models.llama.configuration_llama import LlamaConfig

    def key(name: str, default: Any = None) -> Any:
        value = file.metadata.get(f"llama.{name}", default)
        if value is None:
            raise ModelError(f"{file.path} lacks 'llama.{name}' in its metadata; download it again")
        return value

    hidden, heads = int(key("embedding_length")), int(key("attention.head_count"))
    names = set(file.tensor_names)
    return LlamaConfig(
        vocab_size=int(key("vocab_size", file.metadata.get("tokenizer.ggml.tokens"))),
        hidden_size=hidden,
        intermediate_size=int(key("feed_forward_length")),
        num_hidden_layers=int(key("block_count")),
        num_attention_heads=heads,
        num_key_value_heads=int(key("attention.head_count_kv", heads)),
        head_dim=int(key("attention.key_length", key("rope.dimension_count", hidden // heads))),
        max_position_embeddings=int(key("context_length")),
        rms_norm_eps=float(key("attention.layer_norm_rms_epsilon")),
        rope_parameters={"rope_type": "default", "rope_theta": float(key("rope.freq_base", 10000.0))},
        attention_bias="blk.0.attn_q.bias" in names,
        mlp_bias="blk.0.ffn_gate.bias" in names,
        tie_word_embeddings="output.weight" not in names,
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=file.metadata.get("tokenizer.ggml.eos_token_id"),
        architectures=["LlamaForCausalLM"],
    )


def load_llama(file: GgufFile, dtype: torch.dtype, attention: str, progress: Callable[[float], None]) -> nn.Module:
    """Build ``LlamaForCausalLM`` with the file's weights in ``dtype``; ``progress`` gets fractions of the tensors."""
    from transformers.integrations.gguf.dequant import dequantize
    from transformers.integrations.gguf.reader import GgufHeader, load_gguf_state_dict
    from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRotaryEmbedding

    config = llama_config(file)
    config._attn_implementation = attention
    try:
        header = GgufHeader.from_file(str(file.path))
        lazy = load_gguf_state_dict(header)
    except Exception as error:  # as in open_gguf
        raise ModelError(f"{file.path} is not a sound GGUF file ({first_line(error)}); download it again") from error
    weights: dict[str, torch.Tensor] = {}
    for done, info in enumerate(header.tensors):
        target = _target_name(info.name)
        assert target is not None, "is_plain_llama was asked before"
        try:
            raw = lazy[info.name][...]
            if info.ggml_type not in PLAIN_TYPES:
                raw = dequantize(raw, info.ggml_type, torch.float32)
            weight = raw.reshape(info.shape)
        except Exception as error:  # a truncated file shows up as a shape that does not fit
            raise ModelError(
                f"tensor {info.name} of {file.path} cannot be read ({first_line(error)}); download the file again"
            ) from error
        if ".attn_q." in info.name:
            weight = _rotary_order(weight, config.num_attention_heads)
        elif ".attn_k." in info.name:
            weight = _rotary_order(weight, config.num_key_value_heads)
        weights[target] = weight.to(dtype)
        if done % 32 == 0:
            progress(done / len(header.tensors))

    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    try:
        missing, unexpected = model.load_state_dict(weights, assign=True, strict=False)
    except RuntimeError as error:
        raise ModelError(
            f"the tensors of {file.path} do not fit its metadata ({first_line(error)}); download it again"
        ) from error
    model.tie_weights()
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if set(missing) - tied or unexpected:
        names = sorted((set(missing) - tied) | set(unexpected))
        raise ModelError(f"{file.path} lacks or has surplus tensors, first {names[0]}; download it again")
    model.model.rotary_emb = LlamaRotaryEmbedding(config)  # its buffers are computed, not loaded
    progress(1.0)
    ready: nn.Module = model.eval()
    return ready


def _rotary_order(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a head from GGUF's interleaved rotary pairs to transformers' two halves."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
