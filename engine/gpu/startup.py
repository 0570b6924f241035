"""A GPU's start-up: weights on the device, the check of the way they are computed, the pool, the first steps.

    load (straight to the device) -> check -> 8-bit weights -> largest step -> pool of what is left -> graphs

It runs on the host with Triton's interpreter just as well (``device.HostDevice``), which is how it is tested.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch

from ringserve.config import ExecutorSettings
from ringserve.engine.array_namespace import KVDType
from ringserve.engine.config_check import check_config
from ringserve.engine.devices import Device as DeviceDefaults
from ringserve.engine.dtypes import DType
from ringserve.engine.gpu.decoder_weights import rotary_tables
from ringserve.engine.gpu.device import Device
from ringserve.engine.gpu.device_check import LENGTHS, NUM_PAGES, compute_logits, tolerance
from ringserve.engine.gpu.device_loader import DeviceWeights, load_on_device
from ringserve.engine.gpu.device_runner import DeviceRunner, RunnerLimits
from ringserve.engine.gpu.served_model import CompactForward, GeneralForward, ServedModel
from ringserve.engine.gpu.transformers_model import check_layers
from ringserve.engine.kv_budget import KVBudget, device_kv_memory, free_memory
from ringserve.engine.kv_pool import KVPool, bytes_per_page
from ringserve.engine.model_error import ModelError, UnsupportedDeviceError, first_line
from ringserve.engine.model_limits import choose_max_model_len
from ringserve.engine.page_swaps import choose_swap_space, measure_swaps
from ringserve.engine.ready_engine import Engine
from ringserve.engine.self_check import check_other_path, trace_model
from ringserve.engine.serving_plan import ServingPlan, plan_serving
from ringserve.engine.swap_pool import SwapPool, make_swap_pool
from ringserve.kernels.gpu.page_copy import gather_pages, scatter_pages

CHECKING = "checking the model"
QUANTISING = "quantising weights"
WARMING_UP = "compiling kernels and measuring the largest step"
CAPTURING = "capturing graphs"
Progress = Callable[[str, float], None]

logger = logging.getLogger("ringserve.executor")


def build_gpu_engine(
    settings: ExecutorSettings, defaults: DeviceDefaults, device: Device, threads: int, progress: Progress
) -> Engine:
    """Raises ModelError with one line where the model cannot be served as asked, UnsupportedDeviceError where a CPU
    might."""
    config = settings.config
    plan = plan_serving(settings, defaults, cast(DType, "bfloat16" if settings.dtype == "auto" else settings.dtype))
    page_size, kv_dtype, max_num_batched_tokens = plan.page_size, plan.kv_dtype, plan.max_num_batched_tokens
    weights = load_on_device(
        settings.source,
        plan.dtype,
        device.torch_device,
        progress,
        check_config=lambda config: check_config(config, settings, plan, None),
        compact=config.model_impl != "transformers",
    )
    loaded = weights.loaded
    max_model_len = choose_max_model_len(loaded.config, settings.max_model_len)
    served = _checked_model(weights, settings, page_size, kv_dtype, max_model_len, device, progress)
    _give_back_cached(device)

    limits = RunnerLimits(
        max_num_seqs=settings.max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        page_size=page_size,
        vocab_size=served.vocab_size,
    )

    def runner_on(pool: KVPool, limits: RunnerLimits, eager: bool, swap_pool: SwapPool | None = None) -> DeviceRunner:
        return DeviceRunner(
            served.on(pool, device), device, limits, loaded.eos_token_ids, enforce_eager=eager, swap_pool=swap_pool
        )

    progress(WARMING_UP, 0.0)
    with _fits(f"steps of {max_num_batched_tokens} tokens", "set a smaller --max-num-batched-tokens"):
        # On a pool of one page: steps that only warm up touch none.
        probe = runner_on(KVPool(served.layers, 1, page_size, kv_dtype, device.namespace), limits, True)
        probe.warm_up(lambda part: progress(WARMING_UP, round(part, 2)))
        probe.close()
        del probe
    progress(WARMING_UP, 1.0)
    budget = _budget(settings, plan, served, max_model_len, device)
    if budget.note is not None:
        logger.warning("%s", budget.note)
    remedy = "set a smaller --kv-cache-memory or --gpu-memory-utilization"
    with _fits(f"{budget.num_pages} KV pages", remedy):
        pool = KVPool(served.layers, budget.num_pages, page_size, kv_dtype, device.namespace)
    swap_pool = _swap_pool(pool, config.swap_space, defaults.swap_space, device)
    capturable = served.on(pool, device).capturable
    eager = config.enforce_eager or not capturable
    if not capturable and not config.enforce_eager:
        logger.info("%s is computed by transformers' code, without CUDA graphs", loaded.architecture)
    limits = RunnerLimits(
        limits.max_num_seqs, budget.max_model_len, max_num_batched_tokens, page_size, limits.vocab_size
    )
    progress(CAPTURING, 0.0)
    with _fits("the graphs of decode steps", "set a smaller --gpu-memory-utilization, or --enforce-eager"):
        runner = runner_on(pool, limits, eager, swap_pool)
        runner.warm_up(lambda part: progress(CAPTURING, round(part, 2)))
    progress(CAPTURING, 1.0)
    return Engine(
        plan=plan,
        budget=budget,
        runner=runner,
        vocab_size=served.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        architecture=loaded.architecture,
        defaults=loaded.defaults,
        num_threads=threads,
        model_impl=served.model_impl,
        instructions=device.name,
        swap=measure_swaps(swap_pool),
    )


def _checked_model(
    weights: DeviceWeights,
    settings: ExecutorSettings,
    page_size: int,
    kv_dtype: KVDType,
    max_model_len: int,
    device: Device,
    progress: Progress,
) -> ServedModel:
    """The compact forward where it applies and gives the model's logits, else transformers' code; in 8 bits
    if asked."""
    config, loaded, max_rows = settings.config, weights.loaded, settings.max_num_seqs
    reason = weights.reason
    if weights.decoder is not None:
        rotary = rotary_tables(loaded.model, max(max_model_len, *LENGTHS), device.torch_device)
        compact = CompactForward(weights.decoder, rotary, loaded.model, max_rows)
        try:
            _check(compact, weights, settings, page_size, kv_dtype, max_model_len, device, progress)
        except ModelError as error:
            if config.quantization != "none":  # its own weights are gone
                raise UnsupportedDeviceError(
                    f"{loaded.architecture} with --quantization {config.quantization}: {error}; leave it out"
                ) from error
            reason = str(error)
        else:
            return compact
    if config.model_impl == "fast":
        raise ModelError(f"the fast path does not serve {loaded.architecture}: {reason}; leave --model-impl out")
    if config.model_impl == "auto":
        logger.info("%s is computed by transformers' code, not on the fast path: %s", loaded.architecture, reason)
    progress(CHECKING, 0.0)
    traced = trace_model(loaded.model, device.free_bytes(), max_model_len)
    check_layers(traced.layers)
    general = GeneralForward(loaded.model, traced, max_rows)
    try:
        _check(general, weights, settings, page_size, kv_dtype, max_model_len, device, progress)
    except UnsupportedDeviceError:
        raise
    except ModelError as error:
        raise UnsupportedDeviceError(f"{loaded.architecture} cannot be served right on a GPU: {error}") from error
    return general


def _check(
    served: ServedModel,
    weights: DeviceWeights,
    settings: ExecutorSettings,
    page_size: int,
    kv_dtype: KVDType,
    max_model_len: int,
    device: Device,
    progress: Progress,
) -> None:
    """Compare with the model's own float32 logits, and make the weights what they will be served as on the way."""
    quantization = settings.config.quantization

    def compute(sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if quantization != "none":
            served.quantise(quantization, device, lambda part: progress(QUANTISING, round(part, 2)))
            progress(CHECKING, 0.5)
        pool = KVPool(served.layers, NUM_PAGES, page_size, kv_dtype, device.namespace)
        try:
            return compute_logits(served.on(pool, device), sequences, page_size, device.torch_device)
        except (ModelError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # shapes that kernels refuse, code that does not take the step
            raise UnsupportedDeviceError(
                f"{weights.loaded.architecture} does not run on the GPU's kernels ({type(error).__name__}: "
                f"{first_line(error)}); use --device cpu"
            ) from error

    progress(CHECKING, 0.0)
    dtype = next(weights.loaded.model.parameters()).dtype
    allowed = tolerance(dtype, quantization, settings.config.kv_cache_dtype)
    with _fits("the check of the model", "take a smaller model"):
        check_other_path(weights.loaded.model, compute, LENGTHS, allowed, device.free_bytes(), max_model_len)
    progress(CHECKING, 1.0)


def _budget(
    settings: ExecutorSettings, plan: ServingPlan, served: ServedModel, max_model_len: int, device: Device
) -> KVBudget:
    page_bytes = bytes_per_page(served.layers, plan.page_size, plan.kv_dtype)
    memory = settings.config.kv_cache_memory
    if memory is None:
        utilization = settings.config.gpu_memory_utilization
        memory = device_kv_memory(device.total_bytes(), device.free_bytes(), utilization)
        memory -= page_bytes + 4 * 4096 * len(served.layers)  # the reserved page, and the arrays' alignment
    return plan.budget(page_bytes, max_model_len, max(memory, 0), device.free_bytes())


def _swap_pool(pool: KVPool, asked: int | None, default: int, device: Device) -> SwapPool | None:
    """Where the default does not fit into what the host may pin, there is none; one line says so."""
    try:
        swap_space = choose_swap_space(asked, default, free_memory())
        with _fits("the stages of swapped pages", "set a smaller --gpu-memory-utilization, or --swap-space 0"):
            return make_swap_pool(
                pool, swap_space, device.namespace, device.transfer_lane(), gather_pages, scatter_pages
            )
    except ModelError as error:
        if asked is not None:
            raise
        logger.warning("preempted sequences are not swapped: %s", error)
        return None


@contextmanager
def _fits(what: str, remedy: str) -> Iterator[None]:
    """Memory that is not there becomes one line."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ModelError(f"{what} do not fit into the GPU's memory ({first_line(error)}); {remedy}") from error


def _give_back_cached(device: Device) -> None:
    """What the check took is free, but torch keeps it; the pool is not torch's."""
    if device.torch_device.type == "cuda":
        torch.cuda.empty_cache()
