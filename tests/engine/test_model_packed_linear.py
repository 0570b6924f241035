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
from ringserve.engine.linear_team import LinearTeam
from ringserve.engine.model_loader import load_model
from ringserve.engine.packed_linear import PackedLinear, TeamLinear, can_pack, pack_linears
from ringserve.engine.self_check import check_model
from ringserve.kernels.cpu.features import AVX512, host_level

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


@pytest.mark.skipif(host_level() != AVX512, reason="needs AVX-512 BF16")
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("n", "k", "bias"), [(80, 192, True), (50, 77, False), (700, 64, True)])
def test_the_teams_layers(n: int, k: int, bias: bool, num_threads: int) -> None:
    """Near the float32 product, and the same bits for a row alone, in another order, from strided memory."""
    torch.manual_seed(0)
    plain = nn.Linear(k, n, bias=bias, dtype=torch.bfloat16)
    weight, model = plain.weight.detach().float(), nn.Sequential(plain, nn.ReLU(), nn.Sequential(plain))
    team = LinearTeam(num_threads, AVX512)
    try:
        assert pack_linears(model, team) == 2
        layer = model[0]
        assert isinstance(layer, TeamLinear)
        assert model[2].get_submodule("0") is layer
        assert (layer.weight.dtype, tuple(layer.weight.shape), layer.weight.is_meta) == (torch.bfloat16, (n, k), True)
        x = torch.randn(3, 11, k, dtype=torch.bfloat16)
        with torch.inference_mode():
            found = layer(x)
            exact = nn.functional.linear(x.float(), weight, None if plain.bias is None else plain.bias.float())
            assert found.dtype == torch.bfloat16
            torch.testing.assert_close(found.float(), exact, rtol=2**-7, atol=1e-3)
            assert torch.equal(layer(x[1, 4]), found[1, 4])
            assert torch.equal(layer(x.transpose(0, 1)), found.transpose(0, 1))
            assert torch.equal(layer(x[:, ::3]), found[:, ::3])
            assert layer(x[:, :0]).shape == (3, 0, n)
    finally:
        team.close()


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
    """The same tokens from the same bfloat16 logits, packed by oneDNN or not; tokens, from the team's layers, which
    add in another order."""
    checkpoint = make_checkpoint(tmp_path / name, *SERVED[name])
    prompts = [torch.arange(5, 40), torch.arange(60, 65)]
    results = []
    team = LinearTeam(2, host_level())
    for way in ("plain", "oneDNN", "team"):
        source = ModelSource(str(checkpoint), "directory", name)
        loaded = load_model(source, "bfloat16", lambda stage, fraction: None)
        traced = check_model(loaded.model)
        if way == "oneDNN":
            assert bool(pack_linears(loaded.model)) == can_pack()
        elif way == "team":
            assert pack_linears(loaded.model, team)
        bench = make_bench(loaded, traced, dtype="bfloat16", page_size=8, num_pages=24, num_slots=4)
        jobs = [Job(prompt.tolist(), 6) for prompt in prompts]
        results.append(StepPlanner(bench.runner, 24, 8, 4, budget=16).run(jobs))
    team.close()
    assert results[0] == results[1]
    assert [len(tokens) for tokens in results[2]] == [6, 6]
    assert all(0 <= token < VOCAB_SIZE for result in results for tokens in result for token in tokens)
