"""What a start-up makes, whatever the device: a model that is ready to run, and what everybody else must know of it."""

from __future__ import annotations

from dataclasses import dataclass

from ringserve.engine.kv_budget import KVBudget
from ringserve.engine.model_runner import ModelRunner
from ringserve.engine.page_swaps import SwapInfo
from ringserve.engine.runner import Runner
from ringserve.engine.serving_plan import ServingPlan
from ringserve.messages.columns import pack_i32
from ringserve.messages.sampling import SamplingDefaults, SamplingParams
from ringserve.messages.startup import ExecutorReady
from ringserve.messages.steps import NewSequence, SchedulerOutput


@dataclass(frozen=True)
class Engine:
    """A loaded, checked and warmed up model."""

    plan: ServingPlan
    budget: KVBudget
    runner: Runner
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    architecture: str
    defaults: SamplingDefaults
    num_threads: int
    model_impl: str
    instructions: str
    swap: SwapInfo

    def ready(self, load_seconds: float) -> ExecutorReady:
        """The message that everybody waits for."""
        return ExecutorReady(
            vocab_size=self.vocab_size,
            max_model_len=self.budget.max_model_len,
            eos_token_ids=pack_i32(self.eos_token_ids),
            num_pages=self.budget.num_pages,
            page_size=self.plan.page_size,
            max_num_seqs=self.plan.max_num_seqs,
            max_num_batched_tokens=self.plan.max_num_batched_tokens,
            dtype=self.plan.dtype,
            kv_dtype=self.plan.kv_dtype,
            device=self.plan.device,
            architecture=self.architecture,
            defaults=self.defaults,
            num_threads=self.num_threads,
            load_seconds=load_seconds,
            model_impl=self.model_impl,
            quantization=self.plan.quantization,
            instructions=self.instructions,
            num_host_pages=self.swap.num_host_pages,
            bytes_per_page=self.swap.bytes_per_page,
            swap_bytes_per_second=self.swap.bytes_per_second,
        )


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
