"""`ringserve.bench.accuracy`: its figures on distributions made by hand, and the default model's accuracy."""

from __future__ import annotations

import math

import pytest
import torch
from engine_core import default_model

from ringserve.bench.accuracy import NUM_TOKENS, Agreement, agreement, fast_path, main, measure, texts, together
from ringserve.options import OptionError

pytestmark = pytest.mark.filterwarnings("default")


def test_figures_of_two_distributions() -> None:
    exact = torch.tensor([[0.5, 0.5 - 1e-9, 1e-9], [0.25, 0.5, 0.25], [0.1, 0.1, 0.8]], dtype=torch.float64).log()
    other = torch.tensor([[0.25, 0.75 - 1e-9, 1e-9], [0.25, 0.5, 0.25], [0.1, 0.1, 0.8]], dtype=torch.float64).log()
    found = agreement("by hand", [2, 1, 0], exact, other)
    assert found.same_best == pytest.approx(2 / 3)
    assert found.mean_kl == pytest.approx((0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)) / 3, abs=1e-6)
    assert found.perplexity == pytest.approx(math.sqrt(1 / 0.5 / 0.25), rel=1e-6)


def test_the_texts_are_long_enough() -> None:
    found = texts(default_model())
    assert [len(parts) for parts in found.values()] == [4, 1, 1, 4, 3, 1]
    assert all(len(ids) == NUM_TOKENS for parts in found.values() for ids in parts)


def test_parts_are_weighed_by_their_tokens() -> None:
    found = together("both", [Agreement("a", 30, 4.0, 0.01, 0.9), Agreement("b", 10, 64.0, 0.03, 0.5)])
    assert (found.text, found.tokens) == ("both", 40)
    assert found.perplexity == pytest.approx(8)
    assert found.mean_kl == pytest.approx(0.015)
    assert found.same_best == pytest.approx(0.8)


@pytest.mark.slow
def test_int8() -> None:
    """A mean KL of at most 0.01 on every text, and the same best token for 97.5 % of all tokens (98.0 measured)."""
    torch.set_num_threads(1)
    results = list(measure(default_model(), fast_path(default_model(), "int8")))
    assert len(results) == 6
    assert all(found.mean_kl <= 0.01 for found in results)
    assert together("all", results).same_best >= 0.975
    # Where the model is sure of nothing near-ties fall either way.
    assert all(found.same_best >= (0.97 if found.perplexity < 10 else 0.945) for found in results)


@pytest.mark.slow
def test_bfloat16() -> None:
    torch.set_num_threads(1)
    for found in measure(
        default_model(), fast_path(default_model(), "none"), ["a licence", "256 tokens of a licence, twice"]
    ):
        assert found.mean_kl <= 0.0005
        assert found.same_best >= 0.98


def test_what_does_not_go_together() -> None:
    with pytest.raises(OptionError, match="--quantization int8 is for --model-impl fast"):
        main(["--model-impl", "transformers", "--quantization", "int8"])
