"""The self-check sees what a model does, not what it is called: planted mistakes are refused with their reason."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import GROUPED, SERVED, make_checkpoint
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention

from ringserve.config import ModelSource
from ringserve.engine.attention import ATTENTION_NAME, interface_attention
from ringserve.engine.model_error import ModelError
from ringserve.engine.model_loader import load_model
from ringserve.engine.self_check import check_model

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def load(directory: Path, name: str = "llama", dtype: str = "float32", **changes: Any) -> Any:
    config_class, arguments = SERVED[name]
    checkpoint = make_checkpoint(directory / name, config_class, {**arguments, **changes})
    return load_model(ModelSource(str(checkpoint), "directory", name), dtype, lambda stage, fraction: None).model


@pytest.fixture
def model(tmp_path: Path) -> Any:
    return load(tmp_path)


def wrap(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    module.register_forward_hook(lambda _module, _arguments, output: change(output))


def test_a_sound_model_comes_out_as_it_went_in(tmp_path: Path) -> None:
    model = load(tmp_path, "gemma2", "bfloat16", sliding_window=100)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    traced = check_model(model)
    assert len(traced.layers) == len(traced.modules) == 4
    assert traced.vocab_size == GROUPED["vocab_size"]
    after = model.state_dict()
    assert all(
        after[name].dtype == tensor.dtype and torch.equal(after[name], tensor) for name, tensor in before.items()
    )
    assert model.config.sliding_window == 100
    assert [layer.self_attn.sliding_window for layer in model.model.layers] == [100, None, 100, None]
    assert model.config._attn_implementation == ATTENTION_NAME


@pytest.mark.parametrize("name", ["llama", "opt", "mixtral", "deepseek-v3"])
def test_bfloat16_weights_are_checked_in_float32_with_little_memory_too(name: str, tmp_path: Path) -> None:
    model = load(tmp_path, name, "bfloat16")
    assert check_model(model, free_bytes=0) == check_model(model)
    assert all(parameter.dtype != torch.float16 for parameter in model.parameters())
    assert next(model.parameters()).dtype == torch.bfloat16
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_little_memory_does_not_blind_it(tmp_path: Path) -> None:
    model = load(tmp_path, dtype="bfloat16")
    wrap(model.model.layers[1].mlp, lambda hidden: hidden + hidden.cumsum(1))
    with pytest.raises(ModelError, match="outside of attention"):
        check_model(model, free_bytes=0)


def test_a_recurrence_beside_attention_is_seen(model: Any) -> None:
    wrap(model.model.layers[2].mlp, lambda hidden: hidden + 0.1 * hidden.roll(1, dims=1))
    with pytest.raises(ModelError, match="mix tokens outside of attention"):
        check_model(model)


def test_a_layer_that_goes_around_the_interface_is_seen(model: Any) -> None:
    """One layer computes its own eager attention: causal, correct, and unknown to the KV cache."""
    attention = model.model.layers[1].self_attn

    def own(hidden_states: torch.Tensor, **rest: Any) -> tuple[torch.Tensor, None]:
        scores = hidden_states @ hidden_states.transpose(1, 2) / 64
        mask = torch.ones_like(scores).tril().bool()
        return torch.softmax(scores.masked_fill(~mask, -torch.inf), -1) @ hidden_states, None

    attention.forward = own
    with pytest.raises(ModelError, match="mix tokens outside of attention"):
        check_model(model)


@pytest.mark.parametrize("window", [8, 100, 4096])
def test_a_window_that_the_keywords_do_not_tell_is_seen(window: int, tmp_path: Path) -> None:
    """Windows longer than the check's sequences are shrunk, so that dropping one shows."""
    model = load(tmp_path, "mistral", sliding_window=window)
    check_model(model)
    for layer in model.model.layers:
        layer.self_attn.forward = _without_window(layer.self_attn)
    with pytest.raises(ModelError, match="differ from its own eager pass"):
        check_model(model)


def test_a_window_that_no_sequence_outgrows_does_not_matter(tmp_path: Path) -> None:
    model = load(tmp_path, "mistral", sliding_window=100)
    for layer in model.model.layers:
        layer.self_attn.forward = _without_window(layer.self_attn)
    check_model(model, max_model_len=100)
    with pytest.raises(ModelError, match="differ from its own eager pass"):
        check_model(model, max_model_len=101)


def _without_window(attention: Any) -> Callable[..., Any]:
    """The same attention over a configuration that has no window."""
    forward = attention.forward.__func__
    blind = copy(attention)
    blind.config = copy(attention.config)

    def call(*arguments: Any, **keywords: Any) -> Any:
        blind.config.sliding_window = None
        blind.config._attn_implementation = attention.config._attn_implementation
        keywords["attention_context"] = _Alias(keywords.get("attention_context"), attention)
        return forward(blind, *arguments, **keywords)

    return call


class _Alias:
    """A context that knows the copy under the original's name."""

    def __init__(self, context: Any, module: nn.Module) -> None:
        self._context, self._module = context, module

    def attend(self, module: nn.Module, *rest: Any) -> torch.Tensor:
        out: torch.Tensor = self._context.attend(self._module, *rest)
        return out


@pytest.mark.parametrize(
    ("keyword", "reason"),
    [
        ({"position_bias": torch.zeros(1)}, "'position_bias'"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "not causal"),
    ],
)
def test_keywords_are_never_swallowed(
    model: Any, keyword: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = LlamaAttention.forward

    def forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if "dropout" in keyword:
            monkeypatch.setattr(self, "training", True)
            monkeypatch.setattr(self, "attention_dropout", 0.1)
            return original(self, *arguments, **keywords)
        return original(self, *arguments, **keywords, **keyword)

    monkeypatch.setattr(LlamaAttention, "forward", forward)
    with pytest.raises(ModelError, match=reason):
        check_model(model)


def test_a_keyword_that_is_none_means_nothing(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = LlamaAttention.forward
    monkeypatch.setattr(
        LlamaAttention, "forward", lambda self, *a, **keywords: original(self, *a, **keywords, position_bias=None)
    )
    check_model(model)


def test_code_that_drops_our_keyword_is_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = LlamaAttention.forward

    def forward(self: Any, *arguments: Any, attention_context: Any = None, **keywords: Any) -> Any:
        return original(self, *arguments, **keywords)

    monkeypatch.setattr(LlamaAttention, "forward", forward)
    with pytest.raises(ModelError, match="does not hand keywords on"):
        check_model(model)


def test_positions_of_its_own_are_seen(model: Any) -> None:
    """A model that counts the row's tokens instead of taking position_ids is wrong for every packed sequence."""
    rotary = model.model.rotary_emb
    original = rotary.forward
    rotary.forward = lambda x, position_ids: original(x, torch.arange(x.shape[1])[None])
    with pytest.raises(ModelError, match="differ from its own eager pass"):
        check_model(model)


def test_damaged_weights_are_refused(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.fill_(torch.inf)
    with pytest.raises(ModelError, match=r"(damaged|outside of attention)"):
        check_model(model)


def test_masks_are_refused() -> None:
    q = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ModelError, match="mask"):
        interface_attention(nn.Identity(), q, q, q, torch.zeros(1), attention_context=_Alias(None, nn.Identity()))
