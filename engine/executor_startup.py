"""Everything that happens between an executor's settings and a model that is ready to run."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import torch

from ringserve.config import ExecutorSettings
from ringserve.engine.calibration import input_sizes
from ringserve.engine.fast_forward import FastForward
from ringserve.engine.fast_packing import Packer
from ringserve.engine.fast_startup import COMPILING, QUANTISING, FastModel, prepare_fast
from ringserve.engine.fast_weights import NotApplicableError
from ringserve.engine.int8_linear import quantize_linears
from ringserve.engine.kv_budget import check_page_size, free_memory, plan_kv
from ringserve.engine.kv_pool import KVPool, LayerKV, bytes_per_page
from ringserve.engine.linear_team import LinearTeam
from ringserve.engine.model_error import ModelError, first_line
from ringserve.engine.model_limits import choose_max_model_len
from ringserve.engine.model_loader import LoadedModel, load_model, resolve_dtype, user_cache
from ringserve.engine.model_runner import Forward, ModelRunner
from ringserve.engine.packed_linear import pack_linears, prefers_team
from ringserve.engine.sampler import Sampler
from ringserve.engine.self_check import TracedModel, check_model
from ringserve.engine.torch_forward import TorchForward
from ringserve.engine.weight_cache import WeightCache
from ringserve.kernels.cpu.compiled import is_kept
from ringserve.kernels.cpu.features import host_level, level_name
from ringserve.kernels.cpu.linear_call import run_call
from ringserve.kernels.cpu.row_sampler import CpuRowSampler
from ringserve.messages import (
    ExecutorReady,
    NewSequence,
    SamplingDefaults,
    SamplingParams,
    SchedulerOutput,
    pack_i32,
)

CHECKING = "checking the model"
WARMING_UP = "warming up"
Progress = Callable[[str, float], None]

logger = logging.getLogger("ringserve.executor")


@dataclass(frozen=True)
class Device:
    """What is the device's own choice where the user made none."""

    name: str
    page_size: int
    max_num_batched_tokens: int


CPU = Device(name="cpu", page_size=64, max_num_batched_tokens=256)


@dataclass(frozen=True)
class Engine:
    """A loaded, checked and warmed up model."""

    runner: ModelRunner
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    num_pages: int
    page_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    dtype: str
    device: str
    architecture: str
    defaults: SamplingDefaults
    num_threads: int
    model_impl: str
    quantization: str
    instructions: str

    def ready(self, load_seconds: float) -> ExecutorReady:
        """The message that everybody waits for."""
        return ExecutorReady(
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=pack_i32(self.eos_token_ids),
            num_pages=self.num_pages,
            page_size=self.page_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            dtype=self.dtype,
            kv_dtype=self.dtype,
            device=self.device,
            architecture=self.architecture,
            defaults=self.defaults,
            num_threads=self.num_threads,
            load_seconds=load_seconds,
            model_impl=self.model_impl,
            quantization=self.quantization,
            instructions=self.instructions,
        )


def set_threads(threads: int) -> None:
    """Size torch's pools; no gradients are ever wanted in this process."""
    torch.set_num_threads(threads)
    if torch.get_num_interop_threads() != 1:  # torch takes it once only
        torch.set_num_interop_threads(1)
    torch.set_grad_enabled(False)


def check_threads(threads: int) -> None:
    """Threads that wait for one another's time slices are slower than none: a start would not come to its end."""
    cores = len(os.sched_getaffinity(0))  # a container or taskset may leave few of the machine's
    if threads > cores:
        raise ModelError(f"--threads {threads} is more than the {cores} processors that it may use; leave it out")


def choose_device(asked: Literal["auto", "cpu", "cuda"]) -> Device:
    """This version computes on CPUs."""
    if asked == "cuda":
        raise ModelError("device cuda is not supported by this version; leave --device out or set it to cpu")
    return CPU


def build_engine(settings: ExecutorSettings, threads: int, fast_threads: int, progress: Progress) -> Engine:
    """``threads``: of torch; ``fast_threads``: of the fast path, where it applies. Raises ModelError with one line
    where the model cannot be served as asked."""
    config = settings.config
    device = choose_device(config.device)
    check_threads(max(threads, fast_threads))
    page_size = check_page_size(config.block_size or device.page_size)
    dtype = cast(Literal["float32", "bfloat16"], resolve_dtype(settings.dtype))
    with ThreadPoolExecutor(1, thread_name_prefix="packed-weights") as reader:
        # Reading what an earlier start packed takes no interpreter: it goes on while transformers is imported.
        packer = reader.submit(_packer, settings, dtype)
        loaded = load_model(
            settings.source,
            dtype,
            progress,
            check_config=lambda config: choose_max_model_len(config, settings.max_model_len),
        )
        max_model_len = choose_max_model_len(loaded.config, settings.max_model_len)
        fast = _fast_model(loaded, settings, page_size, max_model_len, progress, packer.result)
    traced = None
    if fast is None:
        progress(CHECKING, 0.0)
        traced = check_model(loaded.model, free_memory(), max_model_len)
        progress(CHECKING, 1.0)
    layers: Sequence[LayerKV] = fast.layers if fast is not None else _checked(traced).layers
    vocab_size = fast.weights.shape.vocab_size if fast is not None else _checked(traced).vocab_size

    budget = plan_kv(
        bytes_per_page=bytes_per_page(layers, page_size, dtype),
        page_size=page_size,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=max_model_len,
        max_model_len_asked=settings.max_model_len is not None,
        kv_cache_memory=config.kv_cache_memory,
        free_bytes=free_memory(),
    )
    if budget.note is not None:
        logger.warning("%s", budget.note)
    try:
        pool = KVPool(layers, budget.num_pages, page_size, dtype)
    except MemoryError as error:
        raise ModelError(
            f"{budget.num_pages} KV pages do not fit into the memory; set a smaller --kv-cache-memory"
        ) from error
    rows = CpuRowSampler(vocab_size)
    if not rows.is_compiled():
        progress(COMPILING, 0.5)
    rows.warm_up()
    sampler = Sampler(vocab_size, loaded.eos_token_ids, settings.max_num_seqs, rows)
    max_num_batched_tokens = settings.max_num_batched_tokens or device.max_num_batched_tokens
    packed = 0
    forward: Forward
    if fast is not None:
        # No step has more tokens than all sequences together.
        step_tokens = min(max_num_batched_tokens, settings.max_num_seqs * budget.max_model_len)
        try:
            forward = FastForward(fast.decoder(pool, fast_threads, step_tokens))
        except MemoryError as error:
            raise ModelError(
                f"steps of {step_tokens} tokens do not fit into the memory; set a smaller --max-num-batched-tokens"
            ) from error
    else:
        # After the check, which needs the plain weights.
        team = None
        int8 = config.quantization == "int8"
        if int8 or (dtype == "bfloat16" and prefers_team(host_level())):
            if not is_kept(run_call):
                progress(COMPILING, 0.0)
            team = LinearTeam(threads, host_level())
        if int8 and team is not None:
            progress(QUANTISING, 0.0)
            sizes = input_sizes(loaded.model)
            quantize_linears(loaded.model, team, sizes, lambda part: progress(QUANTISING, round(part, 1)))
        else:
            packed = pack_linears(loaded.model, team)
        forward = TorchForward(loaded.model, _checked(traced).modules, pool, team)
    runner = ModelRunner(forward, page_size, sampler)

    progress(WARMING_UP, 0.0)
    try:
        warm_up(runner, page_size, min(budget.max_model_len, budget.num_pages * page_size))
    except Exception as error:  # modelling code that reaches for a packed weight fails in its own way
        if not packed:
            raise
        raise ModelError(
            f"{loaded.architecture} does not run on packed bfloat16 weights ({first_line(error)}); use --dtype float32"
        ) from error
    progress(WARMING_UP, 1.0)
    return Engine(
        runner=runner,
        vocab_size=vocab_size,
        max_model_len=budget.max_model_len,
        eos_token_ids=loaded.eos_token_ids,
        num_pages=budget.num_pages,
        page_size=page_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        dtype=dtype,
        device=device.name,
        architecture=loaded.architecture,
        defaults=loaded.defaults,
        num_threads=fast_threads if fast is not None else threads,
        model_impl="fast" if fast is not None else "transformers",
        quantization=config.quantization,
        instructions="" if fast is None else level_name(fast.level),
    )


def _packer(settings: ExecutorSettings, dtype: str) -> Packer:
    path = Path(settings.source.path)
    wanted = settings.config.model_impl != "transformers" and dtype == "bfloat16" and path.exists()
    try:
        cache = WeightCache(user_cache() / "weights") if wanted else None
    except ModelError:  # no home directory: packed at every start
        cache = None
    return Packer(settings.config.quantization, path, cache)


def _fast_model(
    loaded: LoadedModel,
    settings: ExecutorSettings,
    page_size: int,
    max_model_len: int,
    progress: Progress,
    packer: Callable[[], Packer],
) -> FastModel | None:
    """The fast path where it is wanted and applies; why not is said in the log, or is the error if it was asked for."""
    asked = settings.config.model_impl
    if asked == "transformers":
        return None
    try:
        return prepare_fast(
            loaded,
            settings.config.quantization,
            page_size,
            max_model_len,
            free_memory(),
            progress,
            packer=packer,
        )
    except NotApplicableError as error:
        if asked == "fast":
            raise ModelError(
                f"the fast path does not serve {loaded.architecture}: {error}; leave --model-impl out"
            ) from error
        logger.info("%s is computed by transformers' code, not on the fast path: %s", loaded.architecture, error)
    return None


def _checked(traced: TracedModel | None) -> TracedModel:
    assert traced is not None, "one of the two paths was checked"
    return traced


def warm_up(runner: ModelRunner, page_size: int, capacity: int) -> None:
    """Run a short prompt and a decode through slot 0 and page 1, then free the slot: libraries set themselves up at
    their first call, and the first request should not wait for that."""
    num_tokens = min(page_size - 1, capacity - 1, 8)
    if num_tokens < 1:
        return
    one, none = pack_i32([1]), b""
    slot = pack_i32([0])
    for sampling in (
        SamplingParams(seed=0, temperature=0.0),
        SamplingParams(seed=0, temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, logprobs=1),
    ):
        new = NewSequence(0, pack_i32([0] * num_tokens), num_tokens, 0, 0, sampling, 2)
        runner.execute(SchedulerOutput(0, (new,), slot, pack_i32([num_tokens]), one, one, none))
        runner.execute(SchedulerOutput(0, (), slot, one, pack_i32([0]), none, none))
        runner.execute(SchedulerOutput(0, (), none, none, none, none, slot))
