"""The known family of decoders (``decoder_family``) on a device: a compact forward from this project's kernels.

A layer is four matrix products and five small launches: normalisation with the residual's addition, (norms of heads,)
rotation with the write into the pages, attention, the gate. The residual is rounded to the model's type where
transformers' code rounds it. Nothing waits for the device, and where all rows decode, launches depend on shapes alone:
such a step can be captured in a graph. Compiled variants depend on the model, and on the number of rows through the
splits of attention and the row blocks of 8-bit weights, both powers of two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import embedding

from ringserve.engine.gpu.decoder_weights import DecoderWeights
from ringserve.engine.gpu.device import Device
from ringserve.engine.gpu.paged_layers import PagedLayers, StepBlocks
from ringserve.engine.gpu.step_inputs import StepInputs
from ringserve.engine.kv_pool import KVPool, LayerKV
from ringserve.kernels.gpu.add_rms_norm import add_rms_norm
from ringserve.kernels.gpu.head_rms_norm import head_rms_norm
from ringserve.kernels.gpu.rope_kv_write import rope_kv_write
from ringserve.kernels.gpu.silu_mul import silu_mul


class LlamaModel:
    """A decoder and its pages."""

    capturable = True

    def __init__(
        self,
        weights: DecoderWeights,
        rotary: tuple[torch.Tensor, torch.Tensor],
        windows: Sequence[int],
        pool: KVPool,
        device: Device,
        max_rows: int,
    ) -> None:
        """``rotary``: float32 cos and sin [positions, head_dim / 2], of every position that will be served;
        ``windows``: each layer's, 0: none; ``max_rows``: sequences that decode in one step."""
        self._weights = weights
        self._cos, self._sin = rotary
        self._windows = [window or None for window in windows]
        self._pool = pool
        self._device = device
        shape = weights.shape
        self._paged = PagedLayers(pool, device, max_rows)
        self._paged.reserve(shape.heads, shape.kv_heads, shape.head_dim)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """See ``DeviceModel``."""
        weights, shape = self._weights, self._weights.shape
        tokens = len(inputs.token_ids)
        heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
        sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
        blocks = StepBlocks(inputs.chunk_lens, self._device.torch_device)
        residual = embedding(inputs.token_ids, weights.embedding)
        hidden = torch.empty_like(residual)
        add_rms_norm(residual, None, weights.layers[0].input_norm, shape.eps, hidden)
        for index, layer in enumerate(weights.layers):
            parts = torch.split(layer.qkv(hidden), sizes, dim=1)
            q, k, v = (part.view(tokens, -1, dim) for part in parts)
            if layer.q_norm is not None and layer.k_norm is not None:
                head_rms_norm(q, k, layer.q_norm, layer.k_norm, shape.eps)
            rope_kv_write(
                q,
                k,
                v,
                self._cos,
                self._sin,
                inputs.positions,
                inputs.slot_mapping,
                *self._pool.layer(index),
                scales=self._pool.scales(index),
            )
            attention = torch.empty(tokens, heads, dim, dtype=q.dtype, device=q.device)
            self._paged.attend(index, q, attention, inputs, blocks, shape.scale, self._windows[index], None)
            hidden = layer.output(attention.view(tokens, heads * dim))
            add_rms_norm(hidden, residual, layer.mlp_norm, shape.eps, hidden)
            gate_up = layer.gate_up(hidden)
            gated = torch.empty(tokens, shape.intermediate, dtype=q.dtype, device=q.device)
            hidden = layer.down(silu_mul(gate_up, gated))
            if index + 1 < shape.layers:
                add_rms_norm(hidden, residual, weights.layers[index + 1].input_norm, shape.eps, hidden)
        if inputs.wanted is not None:
            hidden, residual = hidden[inputs.wanted], residual[inputs.wanted]
        add_rms_norm(hidden, residual, weights.norm, shape.eps, hidden)
        return weights.head(hidden)


def decoder_layers(weights: DecoderWeights) -> list[LayerKV]:
    """What each layer keeps for a token."""
    shape = weights.shape
    return [LayerKV(shape.kv_heads, shape.head_dim, shape.head_dim)] * shape.layers
