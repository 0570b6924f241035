"""Loading: right weights, all eos ids, and one line with the remedy for whatever is wrong."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import SERVED, make_checkpoint
from runners import default_model
from tokenizers.pre_tokenizers import ByteLevel

from ringserve.config import ModelSource
from ringserve.engine import model_loader
from ringserve.engine.attention import ATTENTION_NAME
from ringserve.engine.gguf_weights import is_plain_llama, open_gguf
from ringserve.engine.model_error import ModelError
from ringserve.engine.model_loader import LoadedModel, load_model, resolve_dtype
from ringserve.engine.self_check import check_model
from ringserve.messages.sampling import SamplingDefaults

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def load(path: Path, dtype: str = "float32", cache: Path | None = None) -> LoadedModel:
    kind: Any = "directory" if path.is_dir() or not path.suffix else "gguf"
    return load_model(ModelSource(str(path), kind, "model"), dtype, lambda stage, fraction: None, cache)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "llama", *SERVED["llama"])


def edit(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text())
    content.update(changes)
    file.write_text(json.dumps(content))


def test_directory(llama: Path) -> None:
    (llama / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [7, 2], "temperature": 0.6, "top_p": 0.9, "top_k": 40, "do_sample": True})
    )
    edit(llama / "config.json", eos_token_id=5)
    stages: list[tuple[str, float]] = []
    source = ModelSource(str(llama), "directory", "model")
    loaded = load_model(source, "bfloat16", lambda stage, fraction: stages.append((stage, fraction)))
    assert loaded.architecture == "LlamaForCausalLM"
    assert loaded.eos_token_ids == (7, 2, 5)
    assert loaded.defaults == SamplingDefaults(temperature=0.6, top_p=0.9, top_k=40)
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}
    model: Any = loaded.model
    assert model.config._attn_implementation == ATTENTION_NAME
    assert not loaded.model.training
    assert stages[0] == ("loading weights", 0.0)
    assert stages[-1] == ("loading weights", 1.0)


@pytest.mark.parametrize("kind", ["directory", "gguf", "gguf-to-convert"])
def test_the_configuration_is_looked_at_before_the_weights(llama: Path, tmp_path: Path, kind: Any) -> None:
    """The weights here cannot be read: what the configuration forbids is told first."""
    if kind == "directory":
        path = llama
        for file in llama.glob("*.safetensors"):
            file.write_bytes(b"damaged")
    else:
        path = write_gguf(tmp_path / "model.gguf", "llama" if kind == "gguf" else "qwen2")
        path.write_bytes(path.read_bytes()[:-1000])
        kind = "gguf"

    def refuse(config: Any) -> None:
        raise ModelError(f"{config.max_position_embeddings} positions are too few")

    for check, words in ((refuse, "positions are too few"), (lambda config: None, "download|use the model's")):
        with pytest.raises(ModelError, match=words):
            load_model(ModelSource(str(path), kind, "model"), "float32", lambda *_: None, tmp_path, check_config=check)


def test_defaults_are_neutral_without_a_generation_config(llama: Path) -> None:
    (llama / "generation_config.json").unlink(missing_ok=True)
    loaded = load(llama)
    assert loaded.defaults == SamplingDefaults()
    assert loaded.eos_token_ids == (2,)


def drop_weight(directory: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = directory / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})


def truncate(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda d: shutil.rmtree(d), "does not exist"),
        (lambda d: (d / "config.json").unlink(), "no config.json"),
        (lambda d: (d / "config.json").write_text("{"), "cannot be read"),
        (lambda d: (d / "config.json").write_text("[]"), "cannot be read"),
        (lambda d: (d / "model.safetensors").unlink(), r"no \*.safetensors"),
        (lambda d: truncate(d / "model.safetensors"), "damaged"),
        (lambda d: (d / "model.safetensors").write_bytes(b""), "damaged"),
        (drop_weight, "lacks 1 of the model's weights, first model.layers.1.mlp.up_proj.weight"),
        (lambda d: edit(d / "config.json", model_type="never-heard-of"), "architecture 'never-heard-of'"),
        (lambda d: edit(d / "config.json", model_type="t5"), "encoder-decoder"),
        (lambda d: edit(d / "config.json", model_type="vit"), "not a decoder"),
        (lambda d: edit(d / "config.json", quantization_config={"quant_method": "gptq"}), "quantised"),
        (
            lambda d: edit(d / "config.json", model_type="own", auto_map={"AutoConfig": "own.Config"}),
            "brings its own code",
        ),
        (lambda d: edit(d / "config.json", hidden_size=32), "where config.json says"),
        (lambda d: edit(d / "config.json", vocab_size=100), r"weight is \[199, 64\] where .* \[100, 64\]"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(llama: Path, damage: Callable[[Path], Any], reason: str) -> None:
    damage(llama)
    with pytest.raises(ModelError, match=reason) as refusal:
        load(llama)
    assert "\n" not in str(refusal.value)
    assert str(llama) in str(refusal.value)


def test_dtype(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    for flags, expected in (("fpu avx512f avx512_bf16", "bfloat16"), ("amx_bf16", "bfloat16"), ("fpu avx2", "float32")):
        cpuinfo.write_text(f"processor : 0\nflags\t\t: {flags}\n")
        assert resolve_dtype("auto", cpuinfo) == expected
    assert resolve_dtype("float32", cpuinfo) == "float32"
    with pytest.raises(ModelError, match="float16"):
        resolve_dtype("float16", cpuinfo)


# ------------------------------------------------------------------------------------------------------ GGUF


def write_gguf(path: Path, architecture: str, hidden: int = 64, tied: bool = True) -> Path:
    """A tiny random model in float32, with a byte-level vocabulary and three end tokens."""
    heads, kv_heads, inner, layers, head_dim = 4, 2, 96, 2, 16
    vocabulary = [*sorted(ByteLevel.alphabet()), "<|bos|>", "<|eos|>", "<|eot|>"]
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([1] * 256 + [3] * 3)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_eot_token_id(258)
    generator = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, (generator.standard_normal(shape) * 0.08).astype(np.float32))

    add("token_embd.weight", len(vocabulary), hidden)
    add("output_norm.weight", hidden)
    if not tied:
        add("output.weight", len(vocabulary), hidden)
    for layer in range(layers):
        for name, rows in (
            ("attn_q", heads * head_dim),
            ("attn_k", kv_heads * head_dim),
            ("attn_v", kv_heads * head_dim),
        ):
            add(f"blk.{layer}.{name}.weight", rows, hidden)
            if architecture == "qwen2":
                add(f"blk.{layer}.{name}.bias", rows)
        add(f"blk.{layer}.attn_output.weight", hidden, heads * head_dim)
        add(f"blk.{layer}.ffn_gate.weight", inner, hidden)
        add(f"blk.{layer}.ffn_up.weight", inner, hidden)
        add(f"blk.{layer}.ffn_down.weight", hidden, inner)
        add(f"blk.{layer}.attn_norm.weight", hidden)
        add(f"blk.{layer}.ffn_norm.weight", hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [True, False])
def test_the_fast_path_reads_what_transformers_reads(tied: bool, tmp_path: Path) -> None:
    """Bit for bit the weights and the logits of the conversion that transformers does."""
    path = write_gguf(tmp_path / "tiny.gguf", "llama", tied=tied)
    file = open_gguf(path)
    assert is_plain_llama(file)
    fast = load(path)
    converted = model_loader._convert_gguf(file, "float32", lambda stage, fraction: None, tmp_path / "cache")
    slow = load(converted)
    expected = slow.model.state_dict()
    got = fast.model.state_dict()
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert fast.config.rope_parameters == slow.config.rope_parameters
    assert fast.config.rms_norm_eps == slow.config.rms_norm_eps
    assert fast.eos_token_ids == (257, 258)
    check_model(fast.model)


def test_quantised_blocks_are_dequantised_exactly() -> None:
    """The default model's first layer against gguf's own dequantiser."""
    file = Path(default_model().path)
    loaded = load(file)
    assert loaded.eos_token_ids == (2,)
    state = loaded.model.state_dict()
    for tensor in gguf.GGUFReader(file).tensors:
        if tensor.name == "blk.0.ffn_gate.weight":
            expected = gguf.dequantize(tensor.data, tensor.tensor_type)
            assert np.array_equal(state["model.layers.0.mlp.gate_proj.weight"].numpy(), expected)
            return
    raise AssertionError("the file has no such tensor")


def test_other_architectures_are_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "qwen2")
    cache = tmp_path / "cache"
    first = load(path, cache=cache)
    assert first.architecture == "Qwen2ForCausalLM"
    assert first.eos_token_ids == (257, 258)
    check_model(first.model)
    made = list((cache / "gguf").iterdir())
    assert len(made) == 1
    assert made[0].name.startswith("tiny-")
    # Now nothing is needed but the converted directory.
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    second = load(path, cache=cache)
    weights = first.model.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in second.model.state_dict().items())
    with pytest.raises(ModelError, match=r"pip install 'ringserve\[gguf\]'"):
        load(path, cache=tmp_path / "another")
    # Another file of the same size that was copied with its times is another file.
    before, content = path.stat(), path.read_bytes()
    path.write_bytes(content[:-4] + bytes(4))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ModelError, match=r"pip install 'ringserve\[gguf\]'"):
        load(path, cache=cache)


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "qwen2")
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=r"cannot be written .* XDG_CACHE_HOME"):
        load(path, cache=tmp_path / "file")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (lambda data: b"", "not a sound GGUF"),
        (lambda data: b"GGML" + data[4:], "not a sound GGUF"),
        (lambda data: data[:200], "not a sound GGUF"),
        (lambda data: data[:-4000], "cannot be read|not a sound GGUF"),
    ],
)
def test_damaged_gguf(tmp_path: Path, content: Callable[[bytes], bytes], reason: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "llama")
    path.write_bytes(content(path.read_bytes()))
    with pytest.raises(ModelError, match=reason) as refusal:
        load(path)
    assert "\n" not in str(refusal.value)
