"""The family that this project's own code computes, on CPUs (``fast_weights``) and on GPUs (``gpu/llama_model``).

It is one family: pre-norm decoders with rotary embeddings and SwiGLU (Llama, Mistral, Qwen2, Qwen3, SmolLM and whatever
is published under their classes). ``family_shape`` looks at the configuration and at the modules that the model really
has (on any device, "meta" included); anything unknown there means the general path. Each device has limits of its own
beside. Whether own code and model compute the same is not taken from here but checked on the loaded weights
(``self_check``).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ringserve.engine.decoder_weights import DecoderShape

FAMILIES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings whose frequencies do not depend on the sequence."""

ATTENTION_PARTS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"})
MLP_PARTS = frozenset({"gate_proj", "up_proj", "down_proj", "act_fn"})
LAYER_PARTS = frozenset({"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
MODEL_PARTS = frozenset({"embed_tokens", "layers", "norm", "rotary_emb"})


class NotApplicableError(Exception):
    """The fast path does not know this model; the text says what it met."""


def family_shape(model: nn.Module) -> DecoderShape:
    """Raises NotApplicableError where the model is not of the family."""
    causal: Any = model
    name = type(causal).__name__
    if name not in FAMILIES:
        raise NotApplicableError(f"{name} is not one of {', '.join(sorted(FAMILIES))}")
    config, inner = causal.config, causal.model
    require(_children(inner) == MODEL_PARTS, "parts beside its layers")
    require(config.hidden_act == "silu", f"activation '{config.hidden_act}'")
    rope = inner.rotary_emb.rope_type
    require(rope in ROPE_TYPES, f"rotary embedding '{rope}'")
    first = inner.layers[0].self_attn
    dim = int(first.head_dim)
    heads, kv_heads = first.q_proj.out_features // dim, first.k_proj.out_features // dim
    require(2 * inner.rotary_emb.inv_freq.numel() == dim, "a rotary embedding of a part of each head")
    require(heads % kv_heads == 0, f"{heads} heads for {kv_heads} kv heads")
    for layer in inner.layers:
        attention = layer.self_attn
        require(_children(layer) == LAYER_PARTS, "parts beside attention and MLP in a layer")
        require(_children(attention) <= ATTENTION_PARTS, "parts in its attention")
        require(_children(layer.mlp) == MLP_PARTS, "parts in its MLP")
        require(attention.scaling == first.scaling and attention.head_dim == dim, "layers with different heads")
        linears = [module for module in layer.modules() if not _children(module) and hasattr(module, "in_features")]
        require(all(type(module) is nn.Linear for module in linears) and len(linears) == 7, "linear layers")
        norms = [module for module in layer.modules() if hasattr(module, "variance_epsilon")]
        require(all(type(module).__name__.endswith("RMSNorm") for module in norms), "norms")
        require({module.variance_epsilon for module in norms} == {inner.norm.variance_epsilon}, "epsilons")
    require(type(causal.lm_head) is nn.Linear, "an output layer")
    # Compiled code looks token ids up without a check: whatever is a column of the logits must be a row here.
    rows = inner.embed_tokens.weight.shape[0]
    require(type(inner.embed_tokens) is nn.Embedding and rows >= causal.lm_head.out_features, "an embedding")
    return DecoderShape(
        vocab_size=causal.lm_head.out_features,
        hidden=config.hidden_size,
        intermediate=inner.layers[0].mlp.gate_proj.out_features,
        layers=len(inner.layers),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        eps=float(inner.norm.variance_epsilon),
        scale=float(first.scaling),
    )


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def require(holds: bool, what: str) -> None:
    """Raises NotApplicableError about ``what`` the model has."""
    if not holds:
        raise NotApplicableError(f"it has {what} that the fast path does not know")


def layer_windows(model: nn.Module) -> list[int]:
    """Each layer's sliding window in tokens; 0: none."""
    causal: Any = model
    mistral = type(causal).__name__ == "MistralForCausalLM"
    windows = []
    for layer in causal.model.layers:
        owner = causal.config if mistral else layer.self_attn
        windows.append(int(getattr(owner, "sliding_window", None) or 0))
    return windows
