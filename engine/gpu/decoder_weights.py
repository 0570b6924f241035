"""The weights of a decoder of the known family (``decoder_family``) on a device, with fused projections.

``place_decoder`` moves a model there: each fused weight is one tensor, and the model's own projections become views of
its parts, so that transformers' code, which start-up compares with, computes from the same memory. A model on the meta
device gets its memory this way; its loader then fills the views.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from ringserve.engine.decoder_family import family_shape, require
from ringserve.engine.decoder_weights import DecoderShape
from ringserve.engine.gpu.linear import DeviceLinear, PlainLinear

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
MAX_GROUP = 16
"""Query heads for a KV head."""


@dataclass
class LayerWeights:
    """One layer."""

    input_norm: torch.Tensor
    qkv: DeviceLinear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: DeviceLinear
    mlp_norm: torch.Tensor
    gate_up: DeviceLinear
    down: DeviceLinear


@dataclass
class DecoderWeights:
    """A whole decoder."""

    shape: DecoderShape
    embedding: torch.Tensor
    """[rows, hidden]."""
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: DeviceLinear


def gpu_shape(model: nn.Module) -> DecoderShape:
    """Raises NotApplicableError where the model is not of the family, or beyond the GPU kernels' limits."""
    shape = family_shape(model)
    dim, group = shape.head_dim, shape.heads // shape.kv_heads
    require(dim % 16 == 0 and MIN_HEAD_DIM <= dim <= MAX_HEAD_DIM, f"head dimension {dim}")
    require(group <= MAX_GROUP, f"{shape.heads} heads for {shape.kv_heads} kv heads")
    return shape


def place_decoder(model: nn.Module, shape: DecoderShape, device: torch.device) -> DecoderWeights:
    """Move ``model``'s weights to the device, fused; memory beside is that of one layer."""
    causal: Any = model
    inner = causal.model
    layers = []
    for layer in inner.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            _place(norm, "weight", device)
        norms: list[torch.Tensor | None] = []
        for name in ("q_norm", "k_norm"):
            norm = getattr(attention, name, None)
            norms.append(None if norm is None else _place(norm, "weight", device))
        layers.append(
            LayerWeights(
                input_norm=layer.input_layernorm.weight.data,
                qkv=_fused((attention.q_proj, attention.k_proj, attention.v_proj), device),
                q_norm=norms[0],
                k_norm=norms[1],
                output=_fused((attention.o_proj,), device),
                mlp_norm=layer.post_attention_layernorm.weight.data,
                gate_up=_fused((mlp.gate_proj, mlp.up_proj), device),
                down=_fused((mlp.down_proj,), device),
            )
        )
    tied = causal.lm_head.weight is inner.embed_tokens.weight
    embedding = _place(inner.embed_tokens, "weight", device)
    if tied:
        causal.lm_head.weight = inner.embed_tokens.weight
        bias = None if causal.lm_head.bias is None else _place(causal.lm_head, "bias", device)
        head = PlainLinear(embedding[: shape.vocab_size], bias)
    else:
        head = _fused((causal.lm_head,), device)
    norm = _place(inner.norm, "weight", device)
    if inner.rotary_emb.inv_freq.is_meta:  # computed, not loaded
        inner.rotary_emb = type(inner.rotary_emb)(causal.config)
    inner.rotary_emb.to(device)
    return DecoderWeights(shape, embedding, tuple(layers), norm, head)


def quantise_decoder(
    weights: DecoderWeights,
    model: nn.Module,
    quantise: Callable[[torch.Tensor, torch.Tensor | None], DeviceLinear],
    progress: Callable[[float], None],
) -> None:
    """Replace each linear layer by what ``quantise`` makes of its weight and bias. The plain weights are given up one
    by one, so that both kinds never lie in memory together: ``model`` cannot compute any more."""
    causal: Any = model

    def small(plain: DeviceLinear, *parts: nn.Linear) -> DeviceLinear:
        assert isinstance(plain, PlainLinear), "quantised once"
        made = quantise(plain.weight, plain.bias)
        for part in parts:
            part.weight = nn.Parameter(part.weight.new_empty(0), requires_grad=False)
        return made

    for index, (layer, mine) in enumerate(zip(causal.model.layers, weights.layers, strict=True)):
        attention, mlp = layer.self_attn, layer.mlp
        mine.qkv = small(mine.qkv, attention.q_proj, attention.k_proj, attention.v_proj)
        mine.output = small(mine.output, attention.o_proj)
        mine.gate_up = small(mine.gate_up, mlp.gate_proj, mlp.up_proj)
        mine.down = small(mine.down, mlp.down_proj)
        progress((index + 1) / (weights.shape.layers + 1))
    weights.head = small(weights.head, causal.lm_head)
    progress(1.0)


def rotary_tables(model: nn.Module, positions: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 cos and sin ``[positions, head_dim / 2]`` of a model of the family."""
    rotary = cast(Any, model).model.rotary_emb
    angles = torch.arange(positions, dtype=torch.float32, device=device)[:, None] * rotary.inv_freq.float()[None]
    return angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling


def _place(module: nn.Module, name: str, device: torch.device) -> torch.Tensor:
    """Move one parameter (or give one on the meta device memory); the tensor."""
    old: nn.Parameter = getattr(module, name)
    new = torch.empty_like(old, device=device) if old.is_meta else old.data.to(device)
    setattr(module, name, nn.Parameter(new, requires_grad=False))
    return new


def _fused(parts: Sequence[nn.Linear], device: torch.device) -> PlainLinear:
    """One layer with the outputs of all, whose parameters become views of its own."""
    outputs, first = sum(part.out_features for part in parts), parts[0].weight
    weight = torch.empty(outputs, parts[0].in_features, dtype=first.dtype, device=device)
    bias = None
    if any(part.bias is not None for part in parts):
        bias = torch.zeros(outputs, dtype=first.dtype, device=device)
    start = 0
    for part in parts:
        rows = slice(start, start + part.out_features)
        start += part.out_features
        part.weight = _view(weight[rows], part.weight)
        if bias is not None and part.bias is not None:
            part.bias = _view(bias[rows], part.bias)
    return PlainLinear(weight, bias)


def _view(place: torch.Tensor, old: torch.Tensor) -> nn.Parameter:
    if not old.is_meta:
        place.copy_(old.data)
    return nn.Parameter(place, requires_grad=False)
