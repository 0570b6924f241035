"""Packed linear layers compute what plain ones do, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import SERVED, VOCAB_SIZE, make_checkpoint
from runners import make_bench
from step_planner import Job, StepPlanner
from torch import nn

from ringserve.config import ModelSource
from ringserve.engine.model_loader import load_model
from ringserve.engine.packed_linear import PackedLinear, can_pack, pack_linears
from ringserve.engine.self_check import check_model

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [2, 3, 33])
def test_bit_identical(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(192, 80, bias=bias, dtype=torch.bfloat16)
    model = nn.Sequential(plain)
    x = torch.randn(1, rows, 192, dtype=torch.bfloat16)
    with torch.inference_mode():
        expected = plain(x)
        assert pack_linears(model) == int(can_pack())
        assert torch.equal(model(x), expected)


def test_what_stays_as_it_is() -> None:
    class Special(nn.Linear):
        """Perhaps more than a product."""

    model = nn.Sequential(nn.Linear(4, 4), Special(4, 4, dtype=torch.bfloat16), nn.ReLU())
    assert pack_linears(model) == 0
    assert not any(isinstance(module, PackedLinear) for module in model)


def test_shape_and_type_stay_readable() -> None:
    packed = PackedLinear(nn.Linear(6, 4, dtype=torch.bfloat16))
    assert (packed.weight.dtype, tuple(packed.weight.shape)) == (torch.bfloat16, (4, 6))
    assert packed.weight.is_meta


@pytest.mark.parametrize("name", SERVED)
def test_every_architecture_runs_packed(name: str, tmp_path: Path) -> None:
    """Packed or not, the same tokens from the same bfloat16 logits."""
    checkpoint = make_checkpoint(tmp_path / name, *SERVED[name])
    prompts = [torch.arange(5, 40), torch.arange(60, 65)]
    results = []
    for pack in (False, True):
        source = ModelSource(str(checkpoint), "directory", name)
        loaded = load_model(source, "bfloat16", lambda stage, fraction: None)
        traced = check_model(loaded.model)
        if pack:
            assert bool(pack_linears(loaded.model)) == can_pack()
        bench = make_bench(loaded, traced, dtype="bfloat16", page_size=8, num_pages=24, num_slots=4)
        jobs = [Job(prompt.tolist(), 6) for prompt in prompts]
        results.append(StepPlanner(bench.runner, 24, 8, 4, budget=16).run(jobs))
    assert results[0] == results[1]
    assert all(0 <= token < VOCAB_SIZE for tokens in results[0] for token in tokens)
