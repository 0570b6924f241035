"""The executor's own way of running steps, under the real scheduler: right in every mode, and how fast."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import torch

from ringserve.bench.gpu.decode_model import LLAMA_8B, PAGE, ModelShape
from ringserve.bench.gpu.device import Device
from ringserve.bench.gpu.random_decoder import decoder_on, random_weights
from ringserve.config import SchedulerConfig
from ringserve.engine.gpu.decoder_weights import DecoderWeights
from ringserve.engine.gpu.device_runner import DeviceRunner, RunnerLimits
from ringserve.engine.kv_layout import KVDType
from ringserve.engine.scheduler import Scheduler
from ringserve.engine.swap_pool import SwapPool
from ringserve.engine.swap_space import SwapCosts
from ringserve.kernels.gpu.page_copy import gather_pages, scatter_pages
from ringserve.messages.columns import pack_i32
from ringserve.messages.requests import TokenizedRequest
from ringserve.messages.sampling import SamplingDefaults, SamplingParams
from ringserve.messages.startup import ExecutorReady

DRY = ModelShape(1, 32, 2, 1, 16, 48, 100)
CHECKED = ModelShape(2, 512, 8, 2, 64, 1024, 8000)
FREE_OF_CHARGE = SwapCosts(bytes_per_page=1, bytes_per_second=1e30, seconds_per_swap=0.0)


@dataclass(frozen=True)
class Sizes:
    """Of one run."""

    slots: int
    max_len: int
    max_tokens: int
    num_pages: int
    num_host_pages: int = 0


@dataclass
class Run:
    """What came of it."""

    tokens: dict[int, list[int]]
    step_seconds: list[float]
    """Between two results."""
    num_preemptions: int
    swapped_in_pages: int


def _run(
    weights: DecoderWeights,
    dtype: torch.dtype,
    sizes: Sizes,
    requests: list[TokenizedRequest],
    eager: bool,
    device: Device,
) -> Run:
    """All requests, two steps in flight."""
    name: KVDType = "float32" if dtype == torch.float32 else "bfloat16"
    model, pool = decoder_on(weights, sizes.num_pages, PAGE, name, sizes.max_len, sizes.slots, device)
    swap_pool = None
    if sizes.num_host_pages:
        lane = device.transfer_lane()
        swap_pool = SwapPool(pool, sizes.num_host_pages, device.namespace, lane, gather_pages, scatter_pages)
    vocab = weights.shape.vocab_size
    limits = RunnerLimits(sizes.slots, sizes.max_len, sizes.max_tokens, PAGE, vocab)
    runner = DeviceRunner(model, device.engine, limits, [], enforce_eager=eager, swap_pool=swap_pool)
    runner.warm_up()
    ready = ExecutorReady(
        vocab_size=vocab,
        max_model_len=sizes.max_len,
        eos_token_ids=b"",
        num_pages=sizes.num_pages,
        page_size=PAGE,
        max_num_seqs=sizes.slots,
        max_num_batched_tokens=sizes.max_tokens,
        dtype=name,
        kv_dtype=name,
        device="cuda",
        architecture="random",
        defaults=SamplingDefaults(),
        num_host_pages=sizes.num_host_pages,
    )
    scheduler = Scheduler(ready, SchedulerConfig(enable_prefix_caching=False), swap_costs=FREE_OF_CHARGE)
    tokens: dict[int, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        if (refused := scheduler.add_request(request, 1)) is not None:
            raise AssertionError(refused.message)
    results: list[float] = []
    while True:
        while (step := scheduler.schedule(time.monotonic_ns())) is not None:
            runner.submit(step)
        if not runner.num_in_flight:
            break
        output = runner.collect()
        results.append(time.perf_counter())
        for row in scheduler.update_from_output(output, time.monotonic_ns()).outputs.rows:
            tokens[row.request_id] += row.token_ids
    stats = scheduler.stats()
    runner.close()
    seconds = [later - earlier for earlier, later in pairwise(results)]
    return Run(tokens, seconds, scheduler.num_preemptions, stats.swapped_in_pages)


def check_runner(device: Device) -> dict[str, object]:
    """In float32: graphs, single launches, and few pages with swapping all give the same tokens, greedy ones as well as
    drawn ones with penalties and log probabilities."""
    shape, slots, longest, new_tokens = (DRY, 2, 12, 4) if device.dry else (CHECKED, 24, 300, 120)
    weights = random_weights(shape, torch.float32, device)
    random = Random(0)
    requests = []
    for number in range(3 if device.dry else 60):
        sampling = SamplingParams(seed=number, temperature=0.0, ignore_eos=True)
        if number % 2:
            sampling = SamplingParams(
                seed=number, temperature=0.9, top_p=0.9, repetition_penalty=1.1, ignore_eos=True, logprobs=number % 5
            )
        prompt = [random.randrange(shape.vocab) for _ in range(random.randint(1, longest))]
        requests.append(TokenizedRequest(number, pack_i32(prompt), sampling, n=1, max_tokens=new_tokens))
    pages_each = -(-(longest + new_tokens) // PAGE)
    max_len = pages_each * PAGE
    plenty = Sizes(slots, max_len, 8 if device.dry else 256, slots * pages_each)
    few = Sizes(slots, max_len, plenty.max_tokens, pages_each + slots // 2, num_host_pages=2 * slots * pages_each)
    expected = _run(weights, torch.float32, plenty, requests, True, device)
    graphs = _run(weights, torch.float32, plenty, requests, False, device)
    swapped = _run(weights, torch.float32, few, requests, False, device)
    for name, run in (("graphs", graphs), ("swapping", swapped)):
        wrong = [number for number, ids in run.tokens.items() if ids != expected.tokens[number]]
        # Sums in another order turn a tie now and then.
        if len(wrong) > len(requests) // 20:
            raise AssertionError(f"{name}: requests {wrong[:10]} differ from single launches")
    if not device.dry and not swapped.swapped_in_pages:
        raise AssertionError("no page was swapped")
    if any(len(ids) != new_tokens for ids in expected.tokens.values()):
        raise AssertionError("a request did not get all of its tokens")
    return {"preemptions": swapped.num_preemptions, "swapped_in_pages": swapped.swapped_in_pages}


def measure_runner(device: Device) -> dict[str, object]:
    """Decode steps of an 8B-shaped model under the scheduler: with all of the host's work beside them."""
    shape, slots, new_tokens = (DRY, 1, 4) if device.dry else (LLAMA_8B, 64, 200)
    prompt_len = 4 if device.dry else 256
    weights = random_weights(shape, device.dtype, device)
    pages_each = -(-(prompt_len + new_tokens) // PAGE)
    sizes = Sizes(slots, pages_each * PAGE, 8 if device.dry else 2048, slots * pages_each + slots)
    sampling = SamplingParams(seed=1, temperature=0.8, top_p=0.95, ignore_eos=True)
    prompt = pack_i32([7] * prompt_len)
    requests = [TokenizedRequest(n, prompt, sampling, n=1, max_tokens=new_tokens) for n in range(slots)]
    result: dict[str, object] = {"slots": slots}
    for eager in (False, True):
        run = _run(weights, device.dtype, sizes, requests, eager, device)
        # The last half of the steps has no prompt in it.
        steps = sorted(run.step_seconds[len(run.step_seconds) // 2 :])
        median = steps[len(steps) // 2]
        result["eager" if eager else "graphs"] = {"step_ms": median * 1e3, "tokens_per_second": slots / median}
    return result
