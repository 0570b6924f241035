"""Weights straight to a device: the same as transformers' loader gives, or its loader's own words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from device_models import FAMILY, OTHERS
from engine_core import default_model
from safetensors.torch import load_file, save_file

from ringserve.config import ModelSource
from ringserve.engine.gpu import device_loader
from ringserve.engine.gpu.device_loader import DeviceWeights, load_on_device
from ringserve.engine.gpu.linear import PlainLinear
from ringserve.engine.model_error import ModelError
from ringserve.engine.model_loader import load_model

CPU = torch.device("cpu")
WEIGHTS = "model.safetensors"


def load(path: Path, dtype: str = "float32", compact: bool = True, seen: list[float] | None = None) -> DeviceWeights:
    def progress(stage: str, fraction: float) -> None:
        if seen is not None:
            seen.append(fraction)

    return load_on_device(ModelSource(str(path), "directory", "m"), dtype, CPU, progress, lambda config: None, compact)


def by_transformers(path: Path, dtype: str = "float32") -> Any:
    return load_model(ModelSource(str(path), "directory", "m"), dtype, lambda stage, fraction: None)


@pytest.fixture
def no_other_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("this checkpoint is read tensor by tensor")

    monkeypatch.setattr(device_loader, "load_model", refuse)


@pytest.mark.usefixtures("no_other_loader")
@pytest.mark.parametrize("name", ["llama", "llama-tied-biases", "llama-rope-yarn", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensor_by_tensor(tmp_path: Path, name: str, dtype: str) -> None:
    path = make_checkpoint(tmp_path, *FAMILY[name])
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2], "temperature": 0.25}))
    seen: list[float] = []
    weights = load(path, dtype, seen=seen)
    expected = by_transformers(path, dtype)
    assert weights.decoder is not None
    assert weights.loaded.eos_token_ids == expected.eos_token_ids == (5, 2)
    assert weights.loaded.defaults == expected.defaults
    assert weights.loaded.architecture == expected.architecture
    own, others = weights.loaded.model.state_dict(), expected.model.state_dict()
    assert own.keys() == others.keys()
    assert all(torch.equal(own[name], tensor) and own[name].dtype is tensor.dtype for name, tensor in others.items())
    model: Any = weights.loaded.model
    assert torch.equal(model.model.rotary_emb.inv_freq, expected.model.model.rotary_emb.inv_freq)
    assert not weights.loaded.model.training
    assert seen == sorted(seen)
    assert seen[0] == 0.0
    assert seen[-1] == 1.0
    assert len(seen) > 2
    first = weights.decoder.layers[0].qkv
    assert isinstance(first, PlainLinear)
    assert first.weight.data_ptr() == own["model.layers.0.self_attn.q_proj.weight"].data_ptr()


@pytest.mark.usefixtures("no_other_loader")
def test_of_several_files_those_of_the_index(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, *FAMILY["llama"])
    expected = by_transformers(path).model.state_dict()
    tensors = load_file(path / WEIGHTS)
    names = sorted(tensors)
    parts = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, path / file)
    # A file that is not in the index, as some repositories have one beside.
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, path / "consolidated.safetensors")
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / WEIGHTS).unlink()
    own = load(path).loaded.model.state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in expected.items())


def test_other_names_and_architectures_go_through_transformers(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "base", *FAMILY["llama"])
    expected = by_transformers(path).model.state_dict()
    tensors = load_file(path / WEIGHTS)
    # Checkpoints of the bare decoder, which transformers knows.
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, path / WEIGHTS)
    weights = load(path)
    assert weights.decoder is not None
    assert all(torch.equal(weights.loaded.model.state_dict()[name], tensor) for name, tensor in expected.items())
    other = load(make_checkpoint(tmp_path / "gemma2", *OTHERS["gemma2"]))
    assert other.decoder is None
    assert "Gemma2ForCausalLM is not one of" in other.reason
    assert load(path, compact=False).decoder is None


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        ("lacking", "lacks 1 of the model's weights, first model.layers.1.mlp.up_proj.weight"),
        ("shape", r"model.norm.weight is \[63\] where config.json says \[64\]"),
        ("cut", "safetensors files of .* are damaged"),
        ("nothing", "has no config.json"),
        ("absent", "does not exist"),
    ],
)
def test_damaged_checkpoints_are_explained(tmp_path: Path, damage: str, line: str) -> None:
    path = make_checkpoint(tmp_path / "m", *FAMILY["llama"])
    tensors = load_file(path / WEIGHTS)
    match damage:
        case "lacking":
            del tensors["model.layers.1.mlp.up_proj.weight"]
            save_file(tensors, path / WEIGHTS)
        case "shape":
            save_file({**tensors, "model.norm.weight": torch.ones(63)}, path / WEIGHTS)
        case "cut":
            (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:50_000])
        case "nothing":
            (path / "config.json").unlink()
        case _:
            path = tmp_path / "nowhere"
    with pytest.raises(ModelError, match=line):
        load(path)


def test_a_gguf_file_is_fused_from_the_host() -> None:
    """The embedded model, which has tied heads."""
    source = default_model()
    weights = load_on_device(source, "bfloat16", CPU, lambda stage, part: None, lambda config: None)
    assert weights.decoder is not None
    model: Any = weights.loaded.model
    qkv, head = weights.decoder.layers[5].qkv, weights.decoder.head
    assert isinstance(qkv, PlainLinear)
    assert isinstance(head, PlainLinear)
    attention = model.model.layers[5].self_attn
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    assert torch.equal(qkv.weight, torch.cat([projection.weight for projection in projections]))
    assert head.weight.data_ptr() == weights.decoder.embedding.data_ptr()


def test_transformers_loader_puts_weights_on_a_device(tmp_path: Path) -> None:
    """Its way by a device map, which needs accelerate."""
    path = make_checkpoint(tmp_path, *OTHERS["gemma2"])
    source = ModelSource(str(path), "directory", "m")
    expected = by_transformers(path).model.state_dict()
    loaded = load_model(source, "float32", lambda stage, part: None, device=CPU)
    assert all(torch.equal(loaded.model.state_dict()[name], tensor) for name, tensor in expected.items())


def test_too_large_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")

    path = make_checkpoint(tmp_path, *FAMILY["llama"])
    monkeypatch.setattr(device_loader, "place_decoder", full)
    with pytest.raises(ModelError, match=r"do not fit into the GPU's memory \(CUDA out .* 2 GiB\); take a smaller"):
        load(path)
