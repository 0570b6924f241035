"""The weights of a decoder (``decoder_family``) in the form in which the fast path on CPUs reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ringserve.engine.decoder_family import NotApplicableError as NotApplicableError
from ringserve.engine.decoder_family import family_shape, require
from ringserve.engine.decoder_family import layer_windows as layer_windows
from ringserve.engine.decoder_weights import DecoderShape, DecoderWeights, LayerWeights, Pack, Rotary, Source
from ringserve.kernels.cpu.attention_inputs import MAX_ROWS
from ringserve.kernels.cpu.linear_bf16 import PANEL
from ringserve.kernels.cpu.linear_bf16 import padded as padded_columns

MAX_HEAD_DIM = 256


def decoder_shape(model: nn.Module) -> DecoderShape:
    """Raises NotApplicableError where the model is not of the family, or beyond the CPU kernels' limits."""
    shape = family_shape(model)
    dim, group = shape.head_dim, shape.heads // shape.kv_heads
    require(dim % 16 == 0 and 32 <= dim <= MAX_HEAD_DIM, f"head dimension {dim}")
    require(group <= MAX_ROWS // 2, f"{shape.heads} heads for {shape.kv_heads} kv heads")
    require(shape.hidden % 16 == 0, f"hidden size {shape.hidden}")
    return shape


def decoder_weights(
    model: nn.Module,
    shape: DecoderShape,
    pack: Pack,
    progress: Callable[[float], None] = lambda fraction: None,
) -> DecoderWeights:
    """Read and pack ``model``'s weights (bfloat16)."""
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
    embedding = _bits(inner.embed_tokens.weight)
    head = pack(_stacked("head", (causal.lm_head,)))
    tied = causal.lm_head.weight is inner.embed_tokens.weight
    return DecoderWeights(
        shape=shape,
        embedding=embedding,
        layers=tuple(layers),
        norm=_floats(inner.norm.weight),
        head=head,
        exact_head=None if not head.int8 else embedding if tied else _bits(causal.lm_head.weight),
        rotary=Rotary(_floats(rotary.inv_freq), float(rotary.attention_scaling)),
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
