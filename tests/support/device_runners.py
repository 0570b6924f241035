"""Both runners over the same logits, for the same scheduler."""

from __future__ import annotations

from context_model import ContextForward, ContextModel, Patterns
from late_device import LateDevice
from runner_core import ready_of

from ringserve.engine.gpu.device import Device
from ringserve.engine.gpu.device_runner import DeviceRunner, RunnerLimits
from ringserve.engine.gpu.device_state import StateWidths
from ringserve.engine.model_runner import ModelRunner
from ringserve.engine.sampler import Sampler
from ringserve.engine.swap_pool import SwapPool
from ringserve.kernels.gpu.page_copy import gather_pages, scatter_pages
from ringserve.messages.columns import unpack_i32
from ringserve.messages.startup import ExecutorReady

VOCAB_SIZE = 97
PAGE_SIZE = 4


def limits_of(ready: ExecutorReady) -> RunnerLimits:
    """The same numbers for the runner."""
    return RunnerLimits(
        ready.max_num_seqs,
        ready.max_model_len,
        ready.max_num_batched_tokens,
        ready.page_size,
        ready.vocab_size,
        max_prompt_logits=12,
    )


def small_ready(num_pages: int = 60, max_num_seqs: int = 6, max_tokens: int = 24, max_len: int = 64) -> ExecutorReady:
    """Limits of these tests."""
    return ready_of(VOCAB_SIZE, max_len, num_pages, PAGE_SIZE, max_num_seqs, max_tokens)


def device_runner(
    ready: ExecutorReady,
    patterns: Patterns,
    device: Device | None = None,
    *,
    enforce_eager: bool = False,
    warm: bool = True,
    widths: StateWidths | None = None,
) -> DeviceRunner:
    """On a device that is as late as it may be; with a swap space where there are host pages."""
    model = ContextModel(patterns, ready.num_pages, ready.page_size)
    device = device if device is not None else LateDevice()
    swap_pool = None
    if ready.num_host_pages:
        swap_pool = SwapPool(
            model.pool,
            ready.num_host_pages,
            device.namespace,
            device.transfer_lane(),
            gather_pages,
            scatter_pages,
            stage_pages=3,
        )
    runner = DeviceRunner(
        model,
        device,
        limits_of(ready),
        unpack_i32(ready.eos_token_ids).tolist(),
        enforce_eager=enforce_eager,
        widths=widths,
        swap_pool=swap_pool,
    )
    if warm:
        runner.warm_up()
    return runner


def cpu_runner(ready: ExecutorReady, patterns: Patterns) -> ModelRunner:
    """The CPU's, with numpy's sampler."""
    sampler = Sampler(ready.vocab_size, unpack_i32(ready.eos_token_ids).tolist(), ready.max_num_seqs)
    return ModelRunner(ContextForward(patterns), ready.page_size, sampler)
