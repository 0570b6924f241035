"""Any architecture on a device: transformers' modelling code with this project's attention in its attention interface.

The code of each layer is transformers' own, its rotation included; a layer's keys and values go into the pages as they
are, and attention is that of ``paged_layers``. It is eager: modelling code is free to wait for the device (routers of
experts do), so nothing here may be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ringserve.engine.attention import AttentionOptions, index_layers
from ringserve.engine.gpu.device import Device
from ringserve.engine.gpu.paged_layers import PagedLayers, StepBlocks
from ringserve.engine.gpu.step_inputs import StepInputs
from ringserve.engine.kv_pool import KVPool, LayerKV
from ringserve.engine.model_error import UnsupportedDeviceError
from ringserve.kernels.gpu.rope_kv_write import rope_kv_write

MAX_HEAD_DIM = 256
MAX_GROUP = 16
"""Query heads for a KV head."""


class NoRotation:
    """Tables with which ``rope_kv_write`` writes keys as they are: an angle of zero, one position for all tokens."""

    def __init__(self, device: torch.device) -> None:
        self.cos = torch.ones(1, 1, dtype=torch.float32, device=device)
        self.sin = torch.zeros(1, 1, dtype=torch.float32, device=device)
        self._positions = torch.zeros(1, dtype=torch.int32, device=device)

    def positions(self, tokens: int) -> torch.Tensor:
        """int32 zeros [tokens]."""
        if tokens > len(self._positions):
            self._positions = self._positions.new_zeros(tokens)
        return self._positions[:tokens]


@dataclass(frozen=True)
class DeviceContext:
    """What a step does in every attention layer; see ``attention.AttentionContext``."""

    paged: PagedLayers
    index_of: Mapping[nn.Module, int]
    inputs: StepInputs
    blocks: StepBlocks
    no_rotation: NoRotation

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        if options.sinks is not None:
            raise UnsupportedDeviceError("attention with sinks is not supported on GPUs; use --device cpu")
        query, key, value = _dense(query), _dense(key), _dense(value)
        layer = self.index_of[module]
        pool = self.paged.pool
        rope_kv_write(
            key[:, :0],  # no queries to turn
            key,
            value,
            self.no_rotation.cos,
            self.no_rotation.sin,
            self.no_rotation.positions(key.shape[0]),
            self.inputs.slot_mapping,
            *pool.layer(layer),
            scales=pool.scales(layer),
        )
        out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
        self.paged.attend(layer, query, out, self.inputs, self.blocks, options.scale, options.window, options.softcap)
        return out


class TransformersModel:
    """A transformers model on a device and its pages."""

    capturable = False

    def __init__(
        self,
        model: nn.Module,
        attention_modules: Sequence[nn.Module],
        pool: KVPool,
        device: Device,
        max_rows: int,
    ) -> None:
        """``attention_modules`` in the order of the pool's layers; ``max_rows``: sequences that decode in one step."""
        self._model: Any = model
        self._index_of: Mapping[nn.Module, int] = index_layers(attention_modules)
        self._paged = PagedLayers(pool, device, max_rows)
        self._device = device
        self._no_rotation = NoRotation(device.torch_device)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """See ``DeviceModel``."""
        context = DeviceContext(
            self._paged,
            self._index_of,
            inputs,
            StepBlocks(inputs.chunk_lens, self._device.torch_device),
            self._no_rotation,
        )
        logits: torch.Tensor = self._model(
            input_ids=inputs.token_ids.long()[None],
            position_ids=inputs.positions.long()[None],
            use_cache=False,
            logits_to_keep=0 if inputs.wanted is None else inputs.wanted,  # 0: all
            attention_context=context,
        ).logits[0]
        return logits


def check_layers(layers: Sequence[LayerKV]) -> None:
    """Raises UnsupportedDeviceError for layers that the kernels do not take."""
    for layer in layers:
        if max(layer.key_dim, layer.value_dim) > MAX_HEAD_DIM or layer.key_dim < 2:
            raise UnsupportedDeviceError(
                f"heads of {layer.key_dim} and {layer.value_dim} dimensions are not supported on GPUs (at most "
                f"{MAX_HEAD_DIM}); use --device cpu"
            )


def _dense(x: torch.Tensor) -> torch.Tensor:
    """With stride 1 in the last dimension, as the kernels want it."""
    return x if x.stride(-1) == 1 else x.contiguous()
