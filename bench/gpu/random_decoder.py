"""The model that is served on GPUs (``engine.gpu.llama_model``), with random weights that never leave the device."""

from __future__ import annotations

import torch

from ringserve.bench.gpu.decode_model import EPS, ModelShape
from ringserve.bench.gpu.device import Device
from ringserve.engine.array_namespace import KVDType
from ringserve.engine.decoder_weights import DecoderShape
from ringserve.engine.gpu.decoder_weights import DecoderWeights, LayerWeights
from ringserve.engine.gpu.linear import PlainLinear
from ringserve.engine.gpu.llama_model import LlamaModel, decoder_layers
from ringserve.engine.kv_pool import KVPool


def random_weights(shape: ModelShape, dtype: torch.dtype, device: Device, seed: int = 0) -> DecoderWeights:
    """Outputs of every layer have about the size of its inputs."""
    generator = torch.Generator(device.torch).manual_seed(seed)

    def linear(outputs: int, inputs: int) -> PlainLinear:
        weight = torch.empty(outputs, inputs, dtype=dtype, device=device.torch)
        return PlainLinear(weight.normal_(std=inputs**-0.5, generator=generator), None)

    def ones() -> torch.Tensor:
        return torch.ones(shape.hidden, dtype=dtype, device=device.torch)

    qkv, heads = (shape.heads + 2 * shape.kv_heads) * shape.head_dim, shape.heads * shape.head_dim
    layers = [
        LayerWeights(
            input_norm=ones(),
            qkv=linear(qkv, shape.hidden),
            q_norm=None,
            k_norm=None,
            output=linear(shape.hidden, heads),
            mlp_norm=ones(),
            gate_up=linear(2 * shape.intermediate, shape.hidden),
            down=linear(shape.hidden, shape.intermediate),
        )
        for _ in range(shape.layers)
    ]
    decoder = DecoderShape(
        vocab_size=shape.vocab,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        eps=EPS,
        scale=shape.head_dim**-0.5,
    )
    embedding = linear(shape.vocab, shape.hidden).weight
    return DecoderWeights(decoder, embedding, tuple(layers), ones(), linear(shape.vocab, shape.hidden))


def decoder_on(
    weights: DecoderWeights, num_pages: int, page_size: int, dtype: KVDType, positions: int, rows: int, device: Device
) -> tuple[LlamaModel, KVPool]:
    """The model over pages of its own."""
    pool = KVPool(decoder_layers(weights), num_pages, page_size, dtype, device.namespace)
    dim = weights.shape.head_dim
    frequencies = 10_000.0 ** -(torch.arange(0, dim, 2, device=device.torch) / dim)
    angles = torch.arange(positions, device=device.torch)[:, None] * frequencies
    rotary = (angles.cos().float(), angles.sin().float())
    return LlamaModel(weights, rotary, [0] * weights.shape.layers, pool, device.engine, rows), pool
