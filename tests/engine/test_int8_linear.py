"""nn.Linear in int8: what it computes, what it replaces, and what it does to the default model's distribution."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import SERVED, VOCAB_SIZE, make_checkpoint
from engine_core import default_model
from runners import make_bench
from step_planner import Job, StepPlanner
from torch import nn

from ringserve.bench.accuracy import agreement, texts
from ringserve.config import ModelSource
from ringserve.engine.calibration import input_sizes
from ringserve.engine.dtypes import DType
from ringserve.engine.general_path import TorchPath
from ringserve.engine.int8_linear import Int8Linear, quantize_linears
from ringserve.engine.kv_pool import KVPool
from ringserve.engine.linear_team import LinearTeam
from ringserve.engine.model_loader import load_model
from ringserve.engine.packed_linear import PackedLinear, TeamLinear, can_pack, prefers_team
from ringserve.engine.self_check import check_model, eager_logits
from ringserve.kernels.cpu.features import AVX512, PORTABLE, Level, host_level

LEVELS: list[Level] = [PORTABLE, *([AVX512] if host_level() == AVX512 else [])]

MOST = {"a licence": (0.004, 0.965), "256 tokens of a licence, twice": (0.003, 0.975)}
"""Mean KL at most, same best token at least."""

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("level", LEVELS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k", "bias"), [(80, 192, True), (50, 70, False), (48, 64, True)])
def test_close_to_the_plain_layer(level: Level, dtype: torch.dtype, n: int, k: int, bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(k, n, bias=bias, dtype=dtype)
    quantised = Int8Linear(plain, LinearTeam(1, level))
    x = torch.randn(2, 17, k, dtype=dtype)
    with torch.inference_mode():
        expected, found = plain(x), quantised(x)
        assert (found.dtype, found.shape) == (dtype, expected.shape)
        spread = float(expected.float().std())
        assert float((found.float() - expected.float()).abs().max()) < 0.05 * spread
        # Rows alone, in another order, and of a tensor that is not contiguous: the same bits.
        assert torch.equal(quantised(x[1, 4]), found[1, 4])
        assert torch.equal(quantised(x.transpose(0, 1)), found.transpose(0, 1))
        assert torch.equal(quantised(x[:, ::3]), found[:, ::3])
        assert quantised(x[:, :0]).shape == (2, 0, n)


def test_what_is_replaced() -> None:
    class Special(nn.Linear):
        """Perhaps more than a product."""

    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, Special(8, 8), nn.Sequential(nn.Linear(8, 8, dtype=torch.bfloat16)), shared)
    parts: list[float] = []
    assert quantize_linears(model, LinearTeam(1, host_level()), progress=parts.append) == 3
    assert parts == sorted(parts)
    assert parts[-1] == 1.0
    assert isinstance(model[0], Int8Linear)
    assert model[3] is model[0]
    assert type(model[1]) is Special
    (inner,) = model[2].children()
    assert isinstance(inner, Int8Linear)
    assert (inner.weight.dtype, tuple(inner.weight.shape), inner.weight.is_meta) == (torch.bfloat16, (8, 8), True)
    assert model(torch.zeros(3, 8)).shape == (3, 8)


@pytest.mark.parametrize("name", SERVED)
def test_every_architecture_runs_in_int8(name: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / name, *SERVED[name])
    loaded = load_model(ModelSource(str(checkpoint), "directory", name), "float32", lambda stage, fraction: None)
    traced = check_model(loaded.model)
    quantize_linears(loaded.model, LinearTeam(1, host_level()), input_sizes(loaded.model))
    bench = make_bench(loaded, traced, dtype="float32", page_size=8, num_pages=24, num_slots=4)
    jobs = [Job(list(range(5, 40)), 6), Job(list(range(60, 65)), 6)]
    results = StepPlanner(bench.runner, 24, 8, 4, budget=16).run(jobs)
    assert [len(tokens) for tokens in results] == [6, 6]
    assert all(0 <= token < VOCAB_SIZE for tokens in results for token in tokens)


@pytest.mark.slow
def test_the_default_models_distribution_stays() -> None:
    """512 tokens against float32: a licence, and a piece of it twice. ``tests/bench/test_accuracy.py`` has more texts,
    on the fast path, which computes the largest logits anew."""
    source = default_model()
    loaded = load_model(source, "float32", lambda stage, fraction: None)
    chosen = {name: torch.tensor(parts[0]) for name, parts in texts(source).items() if name in MOST}
    assert len(chosen) == len(MOST)

    def log_probabilities() -> list[torch.Tensor]:
        return [logits.double().log_softmax(-1) for logits in eager_logits(loaded.model, list(chosen.values()))]

    expected = log_probabilities()
    quantize_linears(loaded.model, LinearTeam(1, host_level()), input_sizes(loaded.model))
    for (name, ids), exact, quantised in zip(chosen.items(), expected, log_probabilities(), strict=True):
        found = agreement(name, ids.tolist(), exact, quantised)
        most_kl, least_same = MOST[name]
        assert found.mean_kl <= most_kl
        assert found.same_best >= least_same


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_general_path_leaves_the_output_layer(name: str, dtype: DType, tmp_path: Path) -> None:
    """Its errors are those that change the best token; in bfloat16 its weights are packed all the same."""
    checkpoint = make_checkpoint(tmp_path / name, *SERVED[name])
    loaded = load_model(ModelSource(str(checkpoint), "directory", name), dtype, lambda stage, fraction: None)
    traced = check_model(loaded.model)
    model: Any = loaded.model
    x = torch.randn(3, model.get_output_embeddings().in_features).to(model.dtype)
    expected = model.get_output_embeddings()(x)
    path = TorchPath(loaded, traced, dtype, "int8", 1, lambda *_: None)
    forward = path.forward(KVPool(traced.layers, 4, 8, dtype))
    head = model.get_output_embeddings()
    packed = TeamLinear if prefers_team(host_level()) else PackedLinear if can_pack() else nn.Linear
    assert type(head) is (packed if dtype == "bfloat16" else nn.Linear)
    torch.testing.assert_close(head(x), expected, rtol=2e-2, atol=1e-3)
    others = [module for module in model.modules() if type(module) is nn.Linear and module is not head]
    assert not others
    forward.close()
