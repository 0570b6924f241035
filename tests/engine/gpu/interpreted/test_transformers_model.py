"""transformers' code on a device with this project's attention, beside its own eager pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import SERVED, make_checkpoint
from device_models import (
    DEVICE,
    OTHERS,
    difference,
    load_tiny,
    own_logits,
    sequences_of,
    served_logits,
    transformers_model,
)

from ringserve.config import ModelSource
from ringserve.engine.gpu.device_check import tolerance
from ringserve.engine.gpu.linear import quantise_modules
from ringserve.engine.gpu.served_model import KINDS, quantiser
from ringserve.engine.gpu.transformers_model import check_layers
from ringserve.engine.kv_pool import LayerKV
from ringserve.engine.model_error import UnsupportedDeviceError
from ringserve.engine.model_loader import load_model
from ringserve.engine.self_check import trace_model
from ringserve.kernels.gpu.kv_format import dequantize_reference, quantize_reference

SEQUENCES = sequences_of()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("others")


@pytest.mark.parametrize("name", OTHERS)
def test_logits_are_the_models_own(directory: Path, name: str) -> None:
    """Windows, soft-capping, scales, rotation of a part of each head, values narrower than keys, experts."""
    loaded = load_tiny(directory, name)
    expected = own_logits(loaded, SEQUENCES)
    traced = trace_model(loaded.model)
    got = served_logits(transformers_model(loaded, traced.modules, traced.layers), SEQUENCES, padding=2)
    assert difference(expected, got).largest < 1e-5


@pytest.mark.parametrize(("name", "kv_cache_dtype"), [("gemma2", "int8"), ("phi3", "fp8")])
def test_keys_and_values_in_eight_bits(directory: Path, name: str, kv_cache_dtype: str) -> None:
    loaded = load_tiny(directory, name, "bfloat16")
    expected = own_logits(loaded, SEQUENCES)
    traced = trace_model(loaded.model)
    model = transformers_model(loaded, traced.modules, traced.layers, kv_cache_dtype)
    assert difference(expected, served_logits(model, SEQUENCES)).spread < tolerance(
        torch.bfloat16, "none", kv_cache_dtype
    )


def test_quantised_layers_are_what_the_codes_say(directory: Path) -> None:
    loaded, reference = load_tiny(directory, "phi3"), load_tiny(directory, "phi3")
    traced = trace_model(loaded.model)
    quantise_modules(loaded.model, quantiser("int8", DEVICE), lambda part: None)
    got = served_logits(transformers_model(loaded, traced.modules, traced.layers), SEQUENCES)
    replaced = 0
    for module in reference.model.modules():
        if type(module) is torch.nn.Linear:
            codes, scales = quantize_reference(module.weight.data, KINDS["int8"])
            module.weight.data = dequantize_reference(codes, scales).float()
            replaced += 1
    assert replaced == 5
    assert difference(own_logits(reference, SEQUENCES), got).largest < 1e-5


def test_attention_with_sinks_is_refused(directory: Path) -> None:
    path = make_checkpoint(directory / "gpt-oss", *SERVED["gpt-oss"])
    loaded = load_model(ModelSource(str(path), "directory", "gpt-oss"), "float32", lambda stage, fraction: None)
    traced = trace_model(loaded.model)
    with pytest.raises(UnsupportedDeviceError, match="sinks"):
        served_logits(transformers_model(loaded, traced.modules, traced.layers), SEQUENCES)


def test_heads_that_the_kernels_do_not_take() -> None:
    check_layers([LayerKV(2, 256, 192)])
    with pytest.raises(UnsupportedDeviceError, match="heads of 288 and 256"):
        check_layers([LayerKV(2, 64, 64), LayerKV(2, 288, 256)])
