"""A CPU's start-up: a model that an earlier start has checked, or the whole way; then everything up to the first step.

torch and transformers are imported only by the whole way (``cpu_loading``): they take longer than all the rest.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from ringserve.config import ExecutorSettings
from ringserve.engine.config_check import check_memory
from ringserve.engine.cpu_model import CpuModel
from ringserve.engine.devices import Device
from ringserve.engine.dtypes import DType, resolve_dtype
from ringserve.engine.fast_decoder import Pages
from ringserve.engine.fast_forward import FastForward
from ringserve.engine.fast_kernels import compile_kernels, is_compiled
from ringserve.engine.fast_model import FastModel
from ringserve.engine.kept_model import load_record, restored_model, start_key
from ringserve.engine.kept_weights import KeptWeights, weights_directory
from ringserve.engine.kv_budget import KVBudget, free_memory
from ringserve.engine.kv_layout import HostPages, LayerKV, bytes_per_page
from ringserve.engine.model_error import ModelError
from ringserve.engine.model_runner import Forward, ModelRunner
from ringserve.engine.page_swaps import choose_swap_space, measure_swaps
from ringserve.engine.ready_engine import Engine, warm_up
from ringserve.engine.sampler import Sampler
from ringserve.engine.serving_plan import ServingPlan, plan_serving
from ringserve.engine.start_stages import COMPILING, READING, WARMING_UP
from ringserve.kernels.cpu.features import level_name
from ringserve.kernels.cpu.row_sampler import CpuRowSampler

if TYPE_CHECKING:
    from ringserve.engine.swap_pool import SwapPool

Progress = Callable[[str, float], None]

logger = logging.getLogger("ringserve.executor")


def check_threads(threads: int) -> None:
    """Threads that wait for one another's time slices are slower than none: a start would not come to its end."""
    cores = len(os.sched_getaffinity(0))  # a container or taskset may leave few of the machine's
    if threads > cores:
        raise ModelError(f"--threads {threads} is more than the {cores} processors that it may use; leave it out")


def build_cpu_engine(
    settings: ExecutorSettings, device: Device, threads: int, fast_threads: int, progress: Progress
) -> Engine:
    """``threads``: of torch; ``fast_threads``: of the fast path, where it applies. Raises ModelError with one line
    where the model cannot be served as asked."""
    config = settings.config
    check_threads(max(threads, fast_threads))
    if config.quantization == "fp8":
        raise ModelError("--quantization fp8 is for GPUs; use int8 on this CPU, or leave it out")
    plan = plan_serving(settings, device, resolve_dtype(settings.dtype))
    page_size, kv_dtype = plan.page_size, plan.kv_dtype
    model = _model(settings, plan, threads, progress)
    page_bytes = bytes_per_page(model.layers, page_size, kv_dtype)
    free_bytes = free_memory()
    if config.kv_cache_memory is not None and config.kv_cache_memory > free_bytes:
        logger.warning(
            "--kv-cache-memory %d is more than the %d bytes that are free: the system may end the server once the KV "
            "cache fills",
            config.kv_cache_memory,
            free_bytes,
        )
    budget = plan.budget(page_bytes, model.max_model_len, config.kv_cache_memory, free_bytes)
    if budget.note is not None:
        logger.warning("%s", budget.note)
    # No step has more tokens than all sequences together.
    step_tokens = min(plan.max_num_batched_tokens, plan.max_num_seqs * budget.max_model_len)
    left = max(0, free_memory() - budget.num_pages * page_bytes)  # both come from the same memory
    swap_space = choose_swap_space(config.swap_space, device.swap_space, left)
    swap_pool: SwapPool | None = None
    forward: Forward
    if isinstance(model.path, FastModel) and not swap_space:
        with _too_large(f"{budget.num_pages} KV pages", "--kv-cache-memory"):
            pages = HostPages(model.layers, budget.num_pages, page_size, kv_dtype)
        forward = _fast_forward(model.path, pages, budget, fast_threads, step_tokens, progress)
    else:
        from ringserve.engine.torch_pages import torch_pages  # the pages as tensors: for modelling code, and swaps
        from ringserve.engine.torch_setup import set_threads

        set_threads(threads)
        with _too_large(f"{budget.num_pages} KV pages", "--kv-cache-memory"):
            pool, swap_pool = torch_pages(model.layers, budget.num_pages, page_size, kv_dtype, swap_space)
        if isinstance(model.path, FastModel):
            forward = _fast_forward(model.path, pool, budget, fast_threads, step_tokens, progress)
        else:
            forward = model.path.forward(pool)
    rows = CpuRowSampler(model.vocab_size)
    if not rows.is_compiled():
        progress(COMPILING, 0.5)
    rows.warm_up()
    sampler = Sampler(model.vocab_size, model.eos_token_ids, settings.max_num_seqs, rows)
    runner = ModelRunner(forward, page_size, sampler, swap_pool)
    progress(WARMING_UP, 0.0)
    try:
        warm_up(runner, page_size, min(budget.max_model_len, budget.num_pages * page_size))
    except Exception as error:
        if not isinstance(model.path, FastModel):
            model.path.explain(error)
        raise
    progress(WARMING_UP, 1.0)
    return Engine(
        plan=plan,
        budget=budget,
        runner=runner,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        architecture=model.architecture,
        defaults=model.defaults,
        num_threads=fast_threads if isinstance(model.path, FastModel) else threads,
        model_impl="fast" if isinstance(model.path, FastModel) else "transformers",
        instructions=level_name(model.path.level) if isinstance(model.path, FastModel) else "",
        swap=measure_swaps(swap_pool),
    )


def _model(settings: ExecutorSettings, plan: ServingPlan, threads: int, progress: Progress) -> CpuModel:
    """What an earlier start has left, or else the whole way."""
    reader = ThreadPoolExecutor(1, thread_name_prefix="packed-weights")
    try:
        # Reading what an earlier start packed takes no interpreter: it goes on while something else is done.
        kept = _kept_weights(settings, plan.dtype)
        reading = reader.submit(kept.read) if kept is not None else None

        def read() -> KeptWeights | None:
            if reading is not None:
                reading.result()
            return kept

        recalled = _recalled(settings, plan, kept, read, progress)
        if recalled is not None:
            return recalled
        from ringserve.engine.cpu_loading import load_and_check
        from ringserve.engine.torch_setup import set_threads

        set_threads(threads)
        return load_and_check(settings, plan, threads, read, progress)
    finally:
        reader.shutdown(wait=False)  # a refusal does not wait for weights that nobody wants


def _kept_weights(settings: ExecutorSettings, dtype: DType) -> KeptWeights | None:
    path = Path(settings.source.path)
    if settings.config.model_impl == "transformers" or dtype != "bfloat16" or not path.exists():
        return None
    directory = weights_directory()
    return None if directory is None else KeptWeights(settings.config.quantization, path, directory)


def _recalled(
    settings: ExecutorSettings,
    plan: ServingPlan,
    kept: KeptWeights | None,
    read: Callable[[], KeptWeights | None],
    progress: Progress,
) -> CpuModel | None:
    """A model that an earlier start has packed and checked."""
    if kept is None or kept.directory is None:
        return None
    try:
        record = load_record(kept.directory, start_key(settings, plan.dtype, kept.identity))
    except OSError:  # this project's own files cannot be read
        return None
    if record is None:
        return None
    shape = record.shape
    layers = [LayerKV(shape.kv_heads, shape.head_dim, shape.head_dim)] * shape.layers
    check_memory(settings.config, plan, layers, record.max_model_len, free_memory())
    progress(READING, 0.0)
    read()
    fast = restored_model(record, kept.entry)
    if fast is None:
        return None
    progress(READING, 1.0)
    logger.info("the weights were packed and checked by an earlier start; they were read from %s", kept.directory)
    return CpuModel(
        architecture=record.architecture,
        eos_token_ids=record.eos_token_ids,
        defaults=record.defaults,
        max_model_len=record.max_model_len,
        vocab_size=record.shape.vocab_size,
        layers=fast.layers,
        path=fast,
    )


def _fast_forward(
    model: FastModel, pages: Pages, budget: KVBudget, num_threads: int, step_tokens: int, progress: Progress
) -> FastForward:
    if not is_compiled(model.level, pages.dtype):
        progress(COMPILING, 0.0)
    with _too_large(f"steps of {step_tokens} tokens", "--max-num-batched-tokens"):
        decoder = model.decoder(pages, num_threads, step_tokens, budget.max_model_len)
        forward = FastForward(decoder)
    if not is_compiled(model.level, pages.dtype):
        compile_kernels(decoder)
    return forward


@contextlib.contextmanager
def _too_large(what: str, option: str) -> Iterator[None]:
    """Raises ModelError where there is not the memory for ``what``."""
    try:
        yield
    except MemoryError as error:
        raise ModelError(f"{what} do not fit into the memory; set a smaller {option}") from error
