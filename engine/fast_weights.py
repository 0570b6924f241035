"""Which models the fast path on CPUs computes, and their weights in the form in which it reads them.

The fast path knows one family: pre-norm decoders with rotary embeddings and SwiGLU (Llama, Mistral, Qwen2, Qwen3,
SmolLM and whatever is published under their classes). ``decoder_shape`` looks at the configuration and at the modules
that the loaded model really has; anything unknown there means the general path. Whether the two compute the same is not
taken from this list but checked on the loaded weights (``self_check``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ringserve.kernels.cpu.linear_bf16 import PANEL
from ringserve.kernels.cpu.linear_bf16 import padded as padded_columns
from ringserve.kernels.cpu.paged_attention import MAX_ROWS

FAMILIES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings whose frequencies do not depend on the sequence."""
MAX_HEAD_DIM = 256

ATTENTION_PARTS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"})
MLP_PARTS = frozenset({"gate_proj", "up_proj", "down_proj", "act_fn"})
LAYER_PARTS = frozenset({"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
MODEL_PARTS = frozenset({"embed_tokens", "layers", "norm", "rotary_emb"})


class NotApplicableError(Exception):
    """The fast path does not know this model; the text says what it met."""


@dataclass(frozen=True)
class DecoderShape:
    """Sizes and numbers of a decoder."""

    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scale: float
    """Of the products of queries and keys."""

    @property
    def qkv_columns(self) -> int:
        """Width of the fused projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


def decoder_shape(model: nn.Module) -> DecoderShape:
    """Raises NotApplicableError."""
    causal: Any = model
    name = type(causal).__name__
    if name not in FAMILIES:
        raise NotApplicableError(f"{name} is not one of {', '.join(sorted(FAMILIES))}")
    config, inner = causal.config, causal.model
    _require(_children(inner) == MODEL_PARTS, "parts beside its layers")
    _require(config.hidden_act == "silu", f"activation '{config.hidden_act}'")
    rope = inner.rotary_emb.rope_type
    _require(rope in ROPE_TYPES, f"rotary embedding '{rope}'")
    first = inner.layers[0].self_attn
    dim = int(first.head_dim)
    heads, kv_heads = first.q_proj.out_features // dim, first.k_proj.out_features // dim
    _require(dim % 16 == 0 and 32 <= dim <= MAX_HEAD_DIM, f"head dimension {dim}")
    _require(2 * inner.rotary_emb.inv_freq.numel() == dim, "a rotary embedding of a part of each head")
    _require(heads % kv_heads == 0 and heads // kv_heads <= MAX_ROWS // 2, f"{heads} heads for {kv_heads} kv heads")
    _require(config.hidden_size % 16 == 0, f"hidden size {config.hidden_size}")
    for layer in inner.layers:
        attention = layer.self_attn
        _require(_children(layer) == LAYER_PARTS, "parts beside attention and MLP in a layer")
        _require(_children(attention) <= ATTENTION_PARTS, "parts in its attention")
        _require(_children(layer.mlp) == MLP_PARTS, "parts in its MLP")
        _require(attention.scaling == first.scaling and attention.head_dim == dim, "layers with different heads")
        linears = [module for module in layer.modules() if not _children(module) and hasattr(module, "in_features")]
        _require(all(type(module) is nn.Linear for module in linears) and len(linears) == 7, "linear layers")
        norms = [module for module in layer.modules() if hasattr(module, "variance_epsilon")]
        _require(all(type(module).__name__.endswith("RMSNorm") for module in norms), "norms")
        _require({module.variance_epsilon for module in norms} == {inner.norm.variance_epsilon}, "epsilons")
    _require(type(causal.lm_head) is nn.Linear, "an output layer")
    # Compiled code looks token ids up without a check: whatever is a column of the logits must be a row here.
    rows = inner.embed_tokens.weight.shape[0]
    _require(type(inner.embed_tokens) is nn.Embedding and rows >= causal.lm_head.out_features, "an embedding")
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


def _require(holds: bool, what: str) -> None:
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


@dataclass(frozen=True)
class Linear:
    """A linear layer, packed."""

    n: int
    k: int
    k_pad: int
    int8: bool
    weight: NDArray[Any]
    bias: NDArray[np.float32]
    """[n, padded to whole panels]."""
    scales: NDArray[np.uint16] | None = None
    factors: NDArray[np.float32] | None = None
    """Of the inputs, [k_pad]."""


@dataclass(frozen=True)
class Source:
    """Where a linear layer's numbers come from; read only if they are wanted."""

    name: str
    n: int
    k: int
    weight: Callable[[], NDArray[np.uint16]]
    """bfloat16 [n, k]."""
    bias: Callable[[], NDArray[np.float32] | None]
    """[n]."""
    module: nn.Module
    """Whose inputs are the layer's."""


Pack = Callable[[Source], Linear]


@dataclass(frozen=True)
class LayerWeights:
    """One layer."""

    input_norm: NDArray[np.float32]
    qkv: Linear
    q_norm: NDArray[np.float32] | None
    k_norm: NDArray[np.float32] | None
    output: Linear
    mlp_norm: NDArray[np.float32]
    gate_up: Linear
    """Panels of gate and up columns take turns."""
    down: Linear


@dataclass(frozen=True)
class DecoderWeights:
    """A whole decoder."""

    shape: DecoderShape
    embedding: NDArray[np.uint16]
    """bfloat16 [vocab_size, hidden]."""
    layers: tuple[LayerWeights, ...]
    norm: NDArray[np.float32]
    head: Linear
    cos: NDArray[np.float32]
    """[positions, head_dim / 2]."""
    sin: NDArray[np.float32]


def decoder_weights(
    model: nn.Module,
    shape: DecoderShape,
    pack: Pack,
    positions: int,
    progress: Callable[[float], None] = lambda fraction: None,
) -> DecoderWeights:
    """Read and pack ``model``'s weights (bfloat16); rotary tables for ``positions`` positions."""
    causal: Any = model
    inner = causal.model
    layers = []
    for index, layer in enumerate(inner.layers):
        attention, mlp = layer.self_attn, layer.mlp
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        prefix = f"layers.{index}."
        q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        layers.append(
            LayerWeights(
                input_norm=_floats(layer.input_layernorm.weight),
                qkv=pack(_stacked(prefix + "qkv", parts)),
                q_norm=None if q_norm is None else _floats(q_norm.weight),
                k_norm=None if k_norm is None else _floats(k_norm.weight),
                output=pack(_stacked(prefix + "output", (attention.o_proj,))),
                mlp_norm=_floats(layer.post_attention_layernorm.weight),
                gate_up=pack(_alternating(prefix + "gate_up", mlp.gate_proj, mlp.up_proj)),
                down=pack(_stacked(prefix + "down", (mlp.down_proj,))),
            )
        )
        progress((index + 1) / (shape.layers + 1))
    rotary = inner.rotary_emb
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * rotary.inv_freq.float()[None]
    return DecoderWeights(
        shape=shape,
        embedding=_bits(inner.embed_tokens.weight),
        layers=tuple(layers),
        norm=_floats(inner.norm.weight),
        head=pack(_stacked("head", (causal.lm_head,))),
        cos=(angles.cos() * rotary.attention_scaling).numpy(),
        sin=(angles.sin() * rotary.attention_scaling).numpy(),
    )


def _bits(weight: torch.Tensor) -> NDArray[np.uint16]:
    bits: NDArray[np.uint16] = weight.detach().to(torch.bfloat16).contiguous().view(torch.uint16).numpy()
    return bits


def _floats(weight: torch.Tensor) -> NDArray[np.float32]:
    floats: NDArray[np.float32] = weight.detach().float().contiguous().numpy()
    return floats


def _stacked(name: str, parts: tuple[Any, ...]) -> Source:
    """Layers with the same input as one."""
    return Source(
        name,
        sum(part.out_features for part in parts),
        parts[0].in_features,
        lambda: np.concatenate([_bits(part.weight) for part in parts]),
        lambda: _biases(parts),
        parts[0],
    )


def _alternating(name: str, gate: Any, up: Any) -> Source:
    """Panels of gate and up columns in turn."""

    def bias() -> NDArray[np.float32] | None:
        if gate.bias is None:
            return None
        rows: NDArray[np.float32] = _interleaved(_floats(gate.bias)[:, None], _floats(up.bias)[:, None])[:, 0]
        return rows

    return Source(
        name,
        2 * padded_columns(gate.out_features),
        gate.in_features,
        lambda: _interleaved(_bits(gate.weight), _bits(up.weight)),
        bias,
        gate,
    )


def _biases(linears: tuple[Any, ...]) -> NDArray[np.float32] | None:
    if all(linear.bias is None for linear in linears):
        return None
    parts = [
        np.zeros(linear.out_features, np.float32) if linear.bias is None else _floats(linear.bias) for linear in linears
    ]
    return np.concatenate(parts)


def _interleaved(gate: NDArray[Any], up: NDArray[Any]) -> NDArray[Any]:
    """[n, k] each -> a panel of rows of ``gate``, one of ``up``, and so on, each filled up with zeros."""
    n, k = gate.shape
    panels = padded_columns(n) // PANEL
    rows = np.zeros((panels, 2, PANEL, k), gate.dtype)
    for which, part in enumerate((gate, up)):
        whole = n // PANEL
        rows[:whole, which] = part[: whole * PANEL].reshape(whole, PANEL, k)
        if whole < panels:
            rows[whole, which, : n - whole * PANEL] = part[whole * PANEL :]
    return rows.reshape(panels * 2 * PANEL, k)
