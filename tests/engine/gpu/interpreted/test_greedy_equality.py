"""Scheduler, runner, graphs, kernels, pages: greedy output in float32 equals ``generate``."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from checkpoints import VOCAB_SIZE
from device_models import DEVICE, MOST_POSITIONS, load_tiny
from engine_core import greedy
from reference import Reference, assert_equal_but_for_ties, generate
from runner_core import RunnerCore, ready_of

from ringserve.config import SchedulerConfig
from ringserve.engine.gpu.decoder_weights import gpu_shape, place_decoder, rotary_tables
from ringserve.engine.gpu.device_runner import DeviceRunner, RunnerLimits
from ringserve.engine.gpu.llama_model import LlamaModel, decoder_layers
from ringserve.engine.kv_pool import KVPool
from ringserve.engine.model_loader import LoadedModel
from ringserve.engine.swap_pool import SwapPool
from ringserve.engine.swap_space import SwapCosts
from ringserve.kernels.gpu.page_copy import gather_pages, scatter_pages
from ringserve.messages.startup import ExecutorReady

PAGE_SIZE = 4
NEW_TOKENS = 10
FREE_OF_CHARGE = SwapCosts(bytes_per_page=1, bytes_per_second=1e30, seconds_per_swap=0.0)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny(tmp_path_factory.mktemp("greedy"), "llama-rope-llama3")


@pytest.fixture(scope="module")
def found(loaded: LoadedModel) -> list[Reference]:
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (1, 9, 5)]
    model: Any = loaded.model
    model.config._attn_implementation = "eager"
    try:
        return generate(model, prompts, NEW_TOKENS)
    finally:
        model.config._attn_implementation = "ringserve_paged"


def core_of(loaded: LoadedModel, ready: ExecutorReady) -> RunnerCore:
    """On pages full of NaN."""
    weights = place_decoder(loaded.model, gpu_shape(loaded.model), DEVICE.torch_device)
    rotary = rotary_tables(loaded.model, MOST_POSITIONS, DEVICE.torch_device)
    pool = KVPool(decoder_layers(weights), ready.num_pages, PAGE_SIZE, "float32", DEVICE.namespace)
    for layer in range(weights.shape.layers):
        for pages in pool.layer(layer):
            pages[1:].fill_(torch.nan)
    swap_pool = None
    if ready.num_host_pages:
        lane = DEVICE.transfer_lane()
        swap_pool = SwapPool(pool, ready.num_host_pages, DEVICE.namespace, lane, gather_pages, scatter_pages)
    model = LlamaModel(weights, rotary, [0] * weights.shape.layers, pool, DEVICE, ready.max_num_seqs)
    limits = RunnerLimits(
        ready.max_num_seqs, ready.max_model_len, ready.max_num_batched_tokens, PAGE_SIZE, ready.vocab_size
    )
    runner = DeviceRunner(model, DEVICE, limits, [2], swap_pool=swap_pool)
    runner.warm_up()
    # Without the prefix cache, which would still know the pages of those that were preempted.
    return RunnerCore(runner, ready, SchedulerConfig(enable_prefix_caching=False), swap_costs=FREE_OF_CHARGE)


def outputs(core: RunnerCore, references: list[Reference]) -> list[list[int]]:
    core.run(greedy(i, reference.prompt, NEW_TOKENS) for i, reference in enumerate(references))
    assert core.max_in_flight == 2
    return [core.results[i, 0].token_ids for i in range(len(references))]


def ready_for(num_pages: int, max_tokens: int) -> ExecutorReady:
    return ready_of(VOCAB_SIZE, 32, num_pages, PAGE_SIZE, 3, max_tokens)


def test_chunks_beside_decoding_rows(loaded: LoadedModel, found: list[Reference]) -> None:
    core = core_of(loaded, ready_for(16, 5))
    assert_equal_but_for_ties(found, outputs(core, found))
    assert core.scheduler.num_preemptions == 0


def test_sequences_that_are_swapped(loaded: LoadedModel, found: list[Reference]) -> None:
    core = core_of(loaded, msgspec.structs.replace(ready_for(7, 16), num_host_pages=12))
    assert_equal_but_for_ties(found, outputs(core, found))
    assert core.scheduler.num_preemptions > 0
    assert core.scheduler.stats().swapped_in_pages > 0
