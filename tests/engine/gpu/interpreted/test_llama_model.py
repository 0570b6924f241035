"""The compact forward on a device, beside transformers' own logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from device_models import (
    DEVICE,
    FAMILY,
    LENGTHS,
    PAGE_SIZE,
    decoder_model,
    difference,
    load_tiny,
    own_logits,
    poisoned_pool,
    sequences_of,
    served_logits,
)

from ringserve.engine.decoder_family import NotApplicableError, layer_windows
from ringserve.engine.gpu.decoder_weights import gpu_shape, place_decoder, rotary_tables
from ringserve.engine.gpu.device_check import compute_logits, tolerance
from ringserve.engine.gpu.linear import MOST_ROWS, PlainLinear, QuantizedLinear
from ringserve.engine.gpu.llama_model import LlamaModel, decoder_layers
from ringserve.engine.gpu.served_model import KINDS, quantiser
from ringserve.engine.gpu.step_inputs import StepInputs
from ringserve.engine.kv_pool import KVPool
from ringserve.engine.model_loader import LoadedModel
from ringserve.kernels.gpu.kv_format import dequantize_reference, quantize_reference

SEQUENCES = sequences_of()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("family")


@pytest.mark.parametrize("name", FAMILY)
def test_logits_are_the_models_own(directory: Path, name: str) -> None:
    """Chunks, a chunk beside a decode, decodes beside padding; pages are full of NaN before."""
    loaded = load_tiny(directory, name)
    expected = own_logits(loaded, SEQUENCES)
    got = served_logits(decoder_model(loaded, layer_windows(loaded.model)), SEQUENCES, padding=2)
    assert difference(expected, got).largest < 1e-5
    shifted = [logits.roll(1, 0) for logits in expected]
    assert difference(shifted, got).spread > 0.25  # the measure sees another token's logits


@pytest.mark.parametrize("name", ["llama-tied-biases", "qwen3"])
def test_in_bfloat16(directory: Path, name: str) -> None:
    loaded = load_tiny(directory, name, "bfloat16")
    expected = own_logits(loaded, SEQUENCES)
    got = served_logits(decoder_model(loaded, layer_windows(loaded.model)), SEQUENCES)
    assert all(logits.dtype is torch.bfloat16 for logits in got)
    assert difference(expected, got).spread < 0.02


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_quantised_weights_are_what_the_codes_say(directory: Path, quantization: str) -> None:
    """transformers' code with the dequantised weights has the same logits."""
    loaded = load_tiny(directory, "llama-tied-biases")
    model = decoder_model(loaded, layer_windows(loaded.model), quantization)
    reference = load_tiny(directory, "llama-tied-biases")
    causal: Any = reference.model
    causal.lm_head.weight = torch.nn.Parameter(causal.lm_head.weight.clone())  # the embedding stays as it is
    for module in causal.modules():
        if isinstance(module, torch.nn.Linear):
            codes, scales = quantize_reference(module.weight.data, KINDS[quantization])
            module.weight.data = dequantize_reference(codes, scales).float()
    assert difference(own_logits(reference, SEQUENCES), served_logits(model, SEQUENCES)).largest < 1e-5


@pytest.mark.parametrize(("dtype", "kv_cache_dtype"), [("float32", "int8"), ("bfloat16", "fp8")])
def test_keys_and_values_in_eight_bits(directory: Path, dtype: str, kv_cache_dtype: str) -> None:
    loaded = load_tiny(directory, "qwen2", dtype)
    model = decoder_model(loaded, layer_windows(loaded.model), kv_cache_dtype=kv_cache_dtype)
    spread = difference(own_logits(loaded, SEQUENCES), served_logits(model, SEQUENCES)).spread
    assert 1e-4 < spread < tolerance(getattr(torch, dtype), "none", kv_cache_dtype)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_layers_of_any_number_of_rows(kind: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(40, 48, generator=generator).to(dtype)
    bias = torch.randn(40, generator=generator).to(dtype)
    layer = quantiser(kind, DEVICE)(weight, bias)
    exact = dequantize_reference(layer.codes, layer.scales)
    for rows in (0, 1, 64, 65, MOST_ROWS, MOST_ROWS + 1):
        x = torch.randn(rows, 48, generator=generator).to(dtype)
        expected = x.double() @ exact.T + bias.double()
        got = layer(x)
        assert got.dtype is dtype
        assert got.shape == (rows, 40)
        if rows:
            assert float((got - expected).norm() / expected.norm()) < (1e-6 if dtype is torch.float32 else 5e-3)


def make_model(loaded: LoadedModel) -> tuple[LlamaModel, KVPool]:
    weights = place_decoder(loaded.model, gpu_shape(loaded.model), DEVICE.torch_device)
    pool = poisoned_pool(decoder_layers(weights), "float32")
    rotary = rotary_tables(loaded.model, 64, DEVICE.torch_device)
    return LlamaModel(weights, rotary, layer_windows(loaded.model), pool, DEVICE, 4), pool


def inputs_of(ids: torch.Tensor, wanted: torch.Tensor | None) -> StepInputs:
    """One chunk in pages 3 and 5, after two padding rows."""
    count = len(ids)
    slots = torch.tensor([3 * 8 + i if i < 8 else 5 * 8 + i - 8 for i in range(count)])
    padded = torch.cat([torch.full((2,), -1), slots]).int()
    return StepInputs(
        token_ids=torch.cat([torch.zeros(2), ids]).int(),
        positions=torch.cat([torch.zeros(2), torch.arange(count)]).int(),
        slot_mapping=padded,
        block_table=torch.tensor([[0, 0], [0, 0], [3, 5]], dtype=torch.int32),
        seq_lens=torch.tensor([0, 0, count], dtype=torch.int32),
        num_decodes=2,
        chunk_lens=(count,),
        chunk_start=torch.tensor([0, count], dtype=torch.int32),
        wanted=wanted,
    )


def test_wanted_rows_and_nothing_written_elsewhere(directory: Path) -> None:
    loaded = load_tiny(directory, "llama")
    ids = SEQUENCES[0]
    expected = own_logits(loaded, [ids])[0]
    model, pool = make_model(loaded)
    for wanted in ([], [2 + len(ids) - 1], [7, 2, 7]):
        got = model.forward(inputs_of(ids, torch.tensor(wanted, dtype=torch.int64)))
        assert got.shape == (len(wanted), expected.shape[1])
        if wanted:
            assert difference([expected[[row - 2 for row in wanted]]], [got]).largest < 1e-5
    for index in range(2):
        for pages in pool.layer(index):
            assert bool(torch.isfinite(pages[3]).all())
            assert bool(torch.isfinite(pages[5, :, : len(ids) - 8]).all())
            assert bool(torch.isnan(pages[5, :, len(ids) - 8 :]).all())
            assert bool(torch.isnan(pages[[1, 2, 4, 6]]).all())
            assert not bool(pages[0].any())


def test_a_step_with_other_rows_gives_the_same_logits(directory: Path) -> None:
    """All at once, in chunks of other sizes, and token by token."""
    loaded = load_tiny(directory, "mistral")
    expected = own_logits(loaded, SEQUENCES)
    model = decoder_model(loaded, layer_windows(loaded.model))
    short, long = min(LENGTHS), max(LENGTHS)
    plans: list[list[tuple[tuple[int, int], tuple[int, int]]]] = [
        [((0, long), (0, short))],
        [((0, 4), (0, 0)), ((4, 5), (0, 3)), ((5, long), (3, short))],
        [((0, long), (0, 2)), *(((long, long), (i, i + 1)) for i in range(2, short))],
    ]
    for steps in plans:
        got = compute_logits(model, SEQUENCES, PAGE_SIZE, DEVICE.torch_device, steps)
        assert difference(expected, got).largest < 1e-5


def test_fused_weights_are_the_models_own_memory(directory: Path) -> None:
    loaded = load_tiny(directory, "qwen2")
    causal: Any = loaded.model
    before = {name: tensor.clone() for name, tensor in causal.state_dict().items()}
    weights = place_decoder(causal, gpu_shape(causal), DEVICE.torch_device)
    after = causal.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    layer = weights.layers[1]
    assert isinstance(layer.qkv, PlainLinear)
    assert isinstance(layer.gate_up, PlainLinear)
    attention, mlp = causal.model.layers[1].self_attn, causal.model.layers[1].mlp
    assert layer.qkv.weight.data_ptr() == attention.q_proj.weight.data_ptr()
    assert layer.gate_up.weight[mlp.gate_proj.out_features :].data_ptr() == mlp.up_proj.weight.data_ptr()
    assert layer.qkv.bias is not None
    assert torch.equal(layer.qkv.bias[-len(attention.v_proj.bias) :], attention.v_proj.bias)


def test_quantising_gives_up_the_plain_weights(directory: Path) -> None:
    loaded = load_tiny(directory, "llama")
    decoder_model(loaded, [0, 0], "int8")
    linears = [module for module in loaded.model.modules() if isinstance(module, torch.nn.Linear)]
    assert len(linears) == 15
    assert all(module.weight.numel() == 0 for module in linears)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": 24}, "head dimension 24"),
        ({"num_attention_heads": 32, "num_key_value_heads": 1}, "32 heads for 1"),
    ],
)
def test_what_the_kernels_do_not_take(changes: dict[str, Any], reason: str) -> None:
    import transformers

    arguments: dict[str, Any] = {**FAMILY["llama"][1], "head_dim": 16, **changes}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**arguments))
    with pytest.raises(NotApplicableError, match=reason):
        gpu_shape(model)


def test_quantised_layers_share_scratch() -> None:
    make: Callable[[torch.Tensor, torch.Tensor | None], QuantizedLinear] = quantiser("int8", DEVICE)
    generator = torch.Generator().manual_seed(4)
    sizes = ((24, 1024), (16, 2048), (40, 32))  # runs of inputs are added up in scratch
    weights = [torch.randn(*size, generator=generator) for size in sizes]
    layers = [make(weight, None) for weight in weights]
    for layer in (*layers, *reversed(layers)):
        x = torch.randn(3, layer.codes.shape[1], generator=generator)
        expected = x.double() @ dequantize_reference(layer.codes, layer.scales).T
        assert float((layer(x) - expected).norm() / expected.norm()) < 1e-6
