"""Weights of zeros for the model that is served on GPUs, where only the course of things is tested."""

from __future__ import annotations

import torch

from ringserve.engine.decoder_weights import DecoderShape
from ringserve.engine.gpu.decoder_weights import DecoderWeights, LayerWeights
from ringserve.engine.gpu.device import Device
from ringserve.engine.gpu.linear import DeviceLinear, PlainLinear
from ringserve.engine.gpu.served_model import quantiser


def blank_weights(shape: DecoderShape, device: Device, quantization: str, biases: bool = False) -> DecoderWeights:
    """In bfloat16 and, where a ``quantization`` is named, its form."""
    make = None if quantization == "none" else quantiser(quantization, device)

    def zeros(*size: int) -> torch.Tensor:
        return torch.zeros(*size, dtype=torch.bfloat16, device=device.torch_device)

    def linear(outputs: int, inputs: int) -> DeviceLinear:
        weight, bias = zeros(outputs, inputs), zeros(outputs) if biases else None
        return PlainLinear(weight, bias) if make is None else make(weight, bias)

    layers = tuple(
        LayerWeights(
            input_norm=zeros(shape.hidden),
            qkv=linear(shape.qkv_columns, shape.hidden),
            q_norm=zeros(shape.head_dim),
            k_norm=zeros(shape.head_dim),
            output=linear(shape.hidden, shape.heads * shape.head_dim),
            mlp_norm=zeros(shape.hidden),
            gate_up=linear(2 * shape.intermediate, shape.hidden),
            down=linear(shape.hidden, shape.intermediate),
        )
        for _ in range(shape.layers)
    )
    head = linear(shape.vocab_size, shape.hidden)
    return DecoderWeights(shape, zeros(shape.vocab_size, shape.hidden), layers, zeros(shape.hidden), head)
