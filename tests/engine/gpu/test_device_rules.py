"""Serving keeps to what a GPU demands: host and device meet in asynchronous copies of pinned memory, and nowhere else.

On CPU tensors neither can be seen. Here the device's tensors have no data (``meta_device``); kernels are not run.
"""

from __future__ import annotations

import struct
from random import Random

import pytest
import torch
from blank_decoder import blank_weights
from meta_device import META, MetaDevice, device_rules
from step_planner import Job, StepPlanner

from ringserve.engine.decoder_weights import DecoderShape
from ringserve.engine.gpu.device_runner import DeviceRunner, RunnerLimits
from ringserve.engine.gpu.llama_model import LlamaModel, decoder_layers
from ringserve.engine.kv_pool import KVPool, LayerKV
from ringserve.engine.swap_pool import SwapPool
from ringserve.engine.transfer_lane import upload
from ringserve.kernels.gpu.page_copy import gather_pages, scatter_pages
from ringserve.messages.columns import pack_i32
from ringserve.messages.sampling import SamplingParams

SHAPE = DecoderShape(201, 64, 96, 2, 4, 2, 64, 1e-5, 0.125)
MAX_SEQS, MAX_LEN, MAX_TOKENS, PAGE_SIZE, NUM_PAGES = 12, 256, 150, 16, 200


def make_runner(device: MetaDevice, quantization: str, eager: bool) -> DeviceRunner:
    weights = blank_weights(SHAPE, device, quantization, biases=True)
    pool = KVPool(decoder_layers(weights), NUM_PAGES, PAGE_SIZE, "int8", device.namespace)
    rotary = (torch.empty(MAX_LEN, 32, device=META), torch.empty(MAX_LEN, 32, device=META))
    model = LlamaModel(weights, rotary, [0, 32], pool, device, MAX_SEQS)
    limits = RunnerLimits(MAX_SEQS, MAX_LEN, MAX_TOKENS, PAGE_SIZE, SHAPE.vocab_size)
    return DeviceRunner(model, device, limits, [2], enforce_eager=eager)


def jobs_of(random: Random) -> list[Job]:
    """Penalties, biases, log probabilities (more than there is room for, too), chunks."""
    jobs = []
    for i in range(24):
        sampling = SamplingParams(
            seed=i,
            temperature=random.choice([0.0, 1.0]),
            repetition_penalty=random.choice([1.0, 1.3]),
            logit_bias_ids=pack_i32([5, 7]),
            logit_bias_values=struct.pack("2f", 1.0, -2.0),
            ignore_eos=True,
            min_tokens=random.choice([0, 3]),
            logprobs=random.choice([-1, 0, 5, 60]),
            prompt_logprobs=random.choice([-1, -1, 3]),
        )
        jobs.append(Job([3] * random.randint(1, 180), random.randint(1, 8), sampling, arrives=random.randrange(12)))
    return jobs


@pytest.mark.parametrize(("quantization", "eager"), [("none", False), ("int8", True)])
def test_steps(quantization: str, eager: bool) -> None:
    torch.set_num_threads(1)
    device = MetaDevice()
    with torch.no_grad():
        with device_rules(device, may_wait=True):
            runner = make_runner(device, quantization, eager)
            runner.warm_up()
            StepPlanner(runner, NUM_PAGES, PAGE_SIZE, MAX_SEQS, MAX_TOKENS).run(jobs_of(Random(0)))  # widens
        with device_rules(device) as rules:
            StepPlanner(runner, NUM_PAGES, PAGE_SIZE, MAX_SEQS, 33).run(jobs_of(Random(1)))
    assert rules.num_copies > 100


def test_swaps() -> None:
    device = MetaDevice()
    pool = KVPool([LayerKV(2, 16, 16)] * 2, 20, PAGE_SIZE, "int8", device.namespace)
    with device_rules(device) as rules, torch.no_grad():
        swap = SwapPool(pool, 10, device.namespace, device.transfer_lane(), gather_pages, scatter_pages, stage_pages=3)
        rules.num_copies = 0
        swap.swap_out([4, 9, 2, 11, 12], [3, 4, 5, 0, 9])
        swap.swap_in([3, 0, 9], [7, 8, 1])
    assert rules.num_copies == 3 + 3 + 3  # runs of host pages either way, and the ids of each stage


def test_the_rules_see_what_a_gpu_refuses() -> None:
    device = MetaDevice()
    here, there = torch.zeros(3), torch.empty(3, device=META)
    pinned = device.pin(torch.zeros(3))
    with device_rules(device):
        there.copy_(pinned, non_blocking=True)
        pinned.copy_(there, non_blocking=True)
        assert upload(here, META).device == META
        with pytest.raises(AssertionError, match="pageable"):
            here.to(META, non_blocking=True)
        with pytest.raises(AssertionError, match="waits"):
            pinned.to(META)
        with pytest.raises(AssertionError, match="pageable"):
            here.copy_(there, non_blocking=True)
        with pytest.raises(AssertionError, match="host and device"):
            torch.add(here, there)
        with pytest.raises(AssertionError, match="reads"):
            there.cpu()
