"""What a configuration shows to be impossible is told before any weight is read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import make_checkpoint
from fast_models import FAMILY
from transformers import AutoConfig, GPT2Config, LlamaConfig

from ringserve.config import ExecutorConfig, ExecutorSettings, ModelSource
from ringserve.engine import cpu_loading, cpu_startup
from ringserve.engine.config_check import check_config, known_layers
from ringserve.engine.devices import CPU
from ringserve.engine.executor_startup import build_engine
from ringserve.engine.kv_layout import LayerKV, bytes_per_page
from ringserve.engine.model_error import ModelError
from ringserve.engine.model_loader import load_model
from ringserve.engine.self_check import check_model
from ringserve.engine.serving_plan import plan_serving

MIB = 1 << 20


def settings_of(path: Path | None = None, max_model_len: int | None = None, **config: Any) -> ExecutorSettings:
    return ExecutorSettings(
        source=ModelSource(str(path), "directory", "m"),
        dtype="bfloat16",
        max_model_len=max_model_len,
        max_num_seqs=2,
        max_num_batched_tokens=None,
        config=ExecutorConfig(device="cpu", **config),
    )


@pytest.mark.parametrize("name", sorted(FAMILY))
def test_layers_are_those_of_the_loaded_model(name: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", *FAMILY[name])
    loaded = load_model(ModelSource(str(path), "directory", "m"), "float32", lambda *_: None)
    assert known_layers(AutoConfig.from_pretrained(path)) == list(check_model(loaded.model).layers)


def test_of_other_architectures_nothing_is_known() -> None:
    assert known_layers(GPT2Config()) is None
    assert known_layers(SimpleNamespace(model_type="llama", num_hidden_layers=2)) is None


CONFIG = LlamaConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32, hidden_size=128)
PAGE = bytes_per_page([LayerKV(2, 32, 32)] * 2, 64, "bfloat16")


@pytest.mark.parametrize(
    ("settings", "free_bytes", "words"),
    [
        (settings_of(max_model_len=4096), MIB, "max_model_len 4096 is more than 2048"),
        (settings_of(kv_cache_memory=PAGE - 1), MIB, "hold no page of 64 tokens"),
        (settings_of(kv_cache_memory=PAGE - 1), None, "hold no page of 64 tokens"),
        (settings_of(max_model_len=65, kv_cache_memory=PAGE), 64 * MIB, "set --kv-cache-memory to at least that"),
        (settings_of(max_model_len=65), 4 * PAGE, "--max-model-len to at most 64"),
        (settings_of(swap_space=PAGE - 1), 64 * MIB, "--swap-space .* holds no KV page"),
    ],
)
def test_what_cannot_be(settings: ExecutorSettings, free_bytes: int | None, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        check_config(CONFIG, settings, plan_serving(settings, CPU, "bfloat16"), free_bytes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "free_bytes", "length"),
    [
        (settings_of(), 64 * MIB, 2048),
        (settings_of(), PAGE * 4, 2048),  # shortened once the weights are there
        (settings_of(max_model_len=64, kv_cache_memory=PAGE, swap_space=PAGE), 0, 64),
        (settings_of(max_model_len=2048), None, 2048),
        (settings_of(swap_space=0), 64 * MIB, 2048),
    ],
)
def test_what_can(settings: ExecutorSettings, free_bytes: int | None, length: int) -> None:
    assert check_config(CONFIG, settings, plan_serving(settings, CPU, "bfloat16"), free_bytes) == length


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"max_model_len": 100_000}, "max_model_len 100000 is more than"),
        ({"kv_cache_memory": 1}, "hold no page"),
        ({"swap_space": 1}, "holds no KV page"),
    ],
)
def test_a_first_and_a_later_start_read_no_weights(
    asked: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(tmp_path / "model", *FAMILY["llama"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    build_engine(settings_of(path), 1, 1, lambda *_: None).runner.close()

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("weights are looked at")

    # A later start: what the first one kept is not made into a model.
    monkeypatch.setattr(cpu_startup, "restored_model", refuse)
    with pytest.raises(ModelError, match=words):
        build_engine(settings_of(path, **asked), 1, 1, lambda *_: None)
    # A first one: the files of the weights cannot be read here.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    monkeypatch.setattr(cpu_loading, "prepare_fast", refuse)
    for file in path.glob("*.safetensors"):
        file.write_bytes(b"damaged")
    with pytest.raises(ModelError, match=words):
        build_engine(settings_of(path, **asked), 1, 1, lambda *_: None)
