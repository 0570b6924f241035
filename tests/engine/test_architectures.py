"""Every architecture is served as transformers computes it, or refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import GROUPED, REFUSED, SERVED, VOCAB_SIZE, make_checkpoint
from runners import load, make_bench
from step_planner import Job, StepPlanner
from transformers import AutoModelForCausalLM

from ringserve.config import ModelSource
from ringserve.engine.model_error import ModelError
from ringserve.engine.model_limits import choose_max_model_len

PROMPT_LENGTHS = (37, 5, 20)
NEW_TOKENS = 12
LOGIT_TOLERANCE = 1e-4
"""Of the logits' range."""

pytestmark = pytest.mark.filterwarnings("default")  # transformers warns about what its own defaults do


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


def reference(checkpoint: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager", dtype=torch.float32)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


@pytest.mark.parametrize("name", SERVED)
def test_served_as_transformers_computes_it(name: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / name, *SERVED[name])
    loaded, traced = load(ModelSource(str(checkpoint), "directory", name), "float32")
    bench = make_bench(loaded, traced, dtype="float32", page_size=8, num_pages=24, num_slots=4)
    jobs = [Job(prompt, NEW_TOKENS, arrives=i) for i, prompt in enumerate(prompts())]
    # 16 tokens a step: the long prompt comes in chunks, beside the others' decodes.
    StepPlanner(bench.runner, 24, 8, 4, budget=16).run(jobs)

    model = reference(checkpoint)
    with torch.no_grad():
        for job in jobs:
            ids = torch.tensor([[*job.prompt]])
            generated = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS
            )
            assert job.tokens == generated[0, len(job.prompt) :].tolist()
            logits = model(torch.tensor([[*job.prompt, *job.tokens]]), use_cache=False).logits[0]
            expected = logits[len(job.prompt) - 1 : -1]
            got = torch.from_numpy(np.stack(bench.sampler.seen[job.slot]))
            assert got.shape == expected.shape
            assert (got - expected).abs().max() <= LOGIT_TOLERANCE * (expected.max() - expected.min())


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    config_class, arguments, reason = REFUSED[name]
    checkpoint = make_checkpoint(tmp_path / name, config_class, arguments)
    with pytest.raises(ModelError, match=reason) as refusal:
        load(ModelSource(str(checkpoint), "directory", name), "float32")
    assert "\n" not in str(refusal.value)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 48,
}


@pytest.mark.parametrize(
    ("config_class", "arguments", "limit"),
    [
        (
            "LlamaConfig",
            {
                **GROUPED,
                "max_position_embeddings": 64,
                "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
            },
            64,
        ),
        ("Phi3Config", {**GROUPED, "original_max_position_embeddings": 48, "rope_parameters": LONGROPE}, 48),
    ],
)
def test_frequencies_that_depend_on_the_longest_position_limit_the_length(
    config_class: str, arguments: dict[str, Any], limit: int, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", config_class, arguments)
    loaded, traced = load(ModelSource(str(checkpoint), "directory", "model"), "float32")
    assert choose_max_model_len(loaded.config, None) == limit
    with pytest.raises(ModelError, match=f"at most {limit}"):
        choose_max_model_len(loaded.config, limit + 1)
    # Up to the limit, a long and a short sequence together are right.
    bench = make_bench(loaded, traced, dtype="float32", page_size=8, num_pages=24, num_slots=4)
    jobs = [Job(prompts()[0][: limit - 12], 12), Job(prompts()[1], 12)]
    StepPlanner(bench.runner, 24, 8, 4, budget=64).run(jobs)
    model = reference(checkpoint)
    with torch.no_grad():
        for job in jobs:
            ids = torch.tensor([[*job.prompt]])
            generated = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
            assert job.tokens == generated[0, len(job.prompt) :].tolist()
