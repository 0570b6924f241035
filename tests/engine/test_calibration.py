"""The sizes of linear layers' inputs, on small models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import SERVED, make_checkpoint
from torch import nn

from ringserve.config import ModelSource
from ringserve.engine.calibration import NUM_TOKENS, input_sizes
from ringserve.engine.model_loader import load_model
from ringserve.engine.self_check import check_model, eager_logits, spread_sequences

pytestmark = pytest.mark.filterwarnings("default")


def test_sizes_are_those_of_the_pass(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "llama", *SERVED["llama"])
    loaded = load_model(ModelSource(str(checkpoint), "directory", "llama"), "float32", lambda stage, fraction: None)
    causal: Any = loaded.model
    sizes = input_sizes(causal)
    linears = [module for module in causal.modules() if isinstance(module, nn.Linear)]
    assert set(sizes) == set(linears)
    assert all(sizes[module].shape == (module.in_features,) for module in linears)
    attention = causal.model.layers[1].self_attn
    assert (sizes[attention.q_proj] == sizes[attention.v_proj]).all()

    kept: list[torch.Tensor] = []
    handle = causal.model.norm.register_forward_hook(lambda module, arguments, output: kept.append(output))
    eager_logits(causal, spread_sequences(causal, (NUM_TOKENS,)))
    handle.remove()
    expected = kept[0].square().mean(dim=(0, 1)).sqrt().numpy()
    assert sizes[causal.lm_head] == pytest.approx(expected, rel=1e-4)
    # Nothing is left behind: neither hooks nor another attention.
    assert not any(module._forward_pre_hooks for module in causal.modules())
    check_model(causal)
