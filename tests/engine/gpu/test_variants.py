"""Nothing is compiled while serving: what a runner's steps launch was compiled by its warm-up.

The real launchers compile for a GPU that is not there; nothing is computed, so any token will do.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
import torch
import triton
from checkpoints import GROUPED
from fake_gpu import SM_90, compile_only
from step_planner import Job, StepPlanner
from transformers import LlamaConfig, LlamaForCausalLM

from ringserve.engine.gpu.decoder_weights import gpu_shape, place_decoder, rotary_tables
from ringserve.engine.gpu.device import HostDevice
from ringserve.engine.gpu.device_runner import DeviceRunner, RunnerLimits
from ringserve.engine.gpu.llama_model import LlamaModel, decoder_layers
from ringserve.engine.kv_pool import KVPool
from ringserve.messages.sampling import SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")  # Triton 3.9 announces 3.10's default

MAX_SEQS = 12
PAGE_SIZE = 16
NUM_PAGES = 200
MAX_TOKENS = 150


class LargeDevice(HostDevice):
    """With so many multiprocessors that attention is split."""

    @property
    def num_multiprocessors(self) -> int:
        return 16


@pytest.fixture(autouse=True)
def _kept_cache(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels compiled by earlier runs are kept where pytest keeps things."""
    assert pytestconfig.cache is not None
    with triton.knobs.cache.scope():
        monkeypatch.setattr(triton.knobs.cache, "dir", str(pytestconfig.cache.mkdir("triton")))
        yield


def runner_of(enforce_eager: bool) -> DeviceRunner:
    device = LargeDevice()
    model = LlamaForCausalLM(LlamaConfig(**{**GROUPED, "num_hidden_layers": 1, "vocab_size": 201})).to(torch.bfloat16)
    weights = place_decoder(model, gpu_shape(model), device.torch_device)
    pool = KVPool(decoder_layers(weights), NUM_PAGES, PAGE_SIZE, "bfloat16")
    rotary = rotary_tables(model, 256, device.torch_device)
    served = LlamaModel(weights, rotary, [0], pool, device, MAX_SEQS)
    limits = RunnerLimits(MAX_SEQS, 256, MAX_TOKENS, PAGE_SIZE, 201)
    return DeviceRunner(served, device, limits, [2], enforce_eager=enforce_eager)


def jobs_of(random: Random) -> list[Job]:
    """Everything that makes a step different from another."""
    jobs = []
    for i in range(24):
        sampling = SamplingParams(
            seed=i,
            temperature=random.choice([0.0, 1.0]),
            top_k=random.choice([0, 1, 7]),
            top_p=random.choice([1.0, 0.5]),
            repetition_penalty=random.choice([1.0, 1.3]),
            ignore_eos=True,
            min_tokens=random.choice([0, 3]),
            logprobs=random.choice([-1, -1, 0, 5, 20, 60]),
            prompt_logprobs=random.choice([-1, -1, 0, 3, 20]),
        )
        prompt = [3] * random.choice([1, 2, 15, 16, 17, 64, random.randint(1, 180)])
        jobs.append(Job(prompt, random.randint(1, 8), sampling, arrives=random.randrange(12)))
    return jobs


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_serving_compiles_nothing(enforce_eager: bool) -> None:
    torch.set_num_threads(1)
    with compile_only(SM_90, resources=False) as compiled, torch.no_grad():
        runner = runner_of(enforce_eager)
        runner.warm_up()
        before = {(kernel.name, kernel.variant) for kernel in compiled}
        launches = len(compiled)
        random = Random(0)
        for budget in (MAX_TOKENS, 33):
            StepPlanner(runner, NUM_PAGES, PAGE_SIZE, MAX_SEQS, budget).run(jobs_of(random))
        assert {(kernel.name, kernel.variant) for kernel in compiled} == before
        assert len(compiled) > 3 * launches > 0
