"""A loaded model as a ``DeviceModel`` on any pool: the compact forward, or transformers' code.

The self-check, the measuring of the memory and serving each want it on pages of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ringserve.engine.decoder_family import layer_windows
from ringserve.engine.gpu.decoder_weights import DecoderWeights, quantise_decoder
from ringserve.engine.gpu.device import Device
from ringserve.engine.gpu.linear import QuantizedLinear, Scratch, quantise_modules
from ringserve.engine.gpu.llama_model import LlamaModel, decoder_layers
from ringserve.engine.gpu.transformers_model import TransformersModel
from ringserve.engine.kv_pool import KVPool, LayerKV
from ringserve.engine.self_check import TracedModel
from ringserve.kernels.gpu.kv_format import KVFormat

KINDS = {"int8": KVFormat.INT8, "fp8": KVFormat.E4M3}
"""Of weights, by --quantization."""


class CompactForward:
    """The compact forward (``llama_model``)."""

    model_impl = "fast"

    def __init__(
        self, weights: DecoderWeights, rotary: tuple[torch.Tensor, torch.Tensor], model: nn.Module, max_rows: int
    ) -> None:
        """``model``: transformers' own, with the same weights."""
        self._weights, self._rotary, self._model, self._max_rows = weights, rotary, model, max_rows

    @property
    def layers(self) -> Sequence[LayerKV]:
        """What each layer keeps for a token."""
        return decoder_layers(self._weights)

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self._weights.shape.vocab_size

    def quantise(self, quantization: str, device: Device, progress: Callable[[float], None]) -> None:
        """Make the linear layers ``int8`` or ``fp8``; transformers' own model cannot compute any more."""
        quantise_decoder(self._weights, self._model, quantiser(quantization, device), progress)

    def on(self, pool: KVPool, device: Device) -> LlamaModel:
        """With these pages, and the windows that the model has now (a check makes them small)."""
        windows = layer_windows(self._model)
        return LlamaModel(self._weights, self._rotary, windows, pool, device, self._max_rows)


@dataclass(frozen=True)
class GeneralForward:
    """transformers' code (``transformers_model``)."""

    model: nn.Module
    traced: TracedModel
    max_rows: int
    model_impl = "transformers"

    @property
    def layers(self) -> Sequence[LayerKV]:
        """What each layer keeps for a token."""
        return self.traced.layers

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self.traced.vocab_size

    def quantise(self, quantization: str, device: Device, progress: Callable[[float], None]) -> None:
        """Make the plain linear layers ``int8`` or ``fp8``."""
        quantise_modules(self.model, quantiser(quantization, device), progress)

    def on(self, pool: KVPool, device: Device) -> TransformersModel:
        """With these pages."""
        return TransformersModel(self.model, self.traced.modules, pool, device, self.max_rows)


ServedModel = CompactForward | GeneralForward


def quantiser(quantization: str, device: Device) -> Callable[[torch.Tensor, torch.Tensor | None], QuantizedLinear]:
    """Makes 8-bit layers of weights and biases; all of them share scratch."""
    scratch = Scratch(torch.empty(1, dtype=torch.float32, device=device.torch_device))
    kind, architecture, multiprocessors = KINDS[quantization], device.architecture, device.num_multiprocessors

    def quantise(weight: torch.Tensor, bias: torch.Tensor | None) -> QuantizedLinear:
        return QuantizedLinear(weight, bias, kind, architecture, multiprocessors, scratch)

    return quantise
