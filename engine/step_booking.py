"""A planned step becomes a fact: what the sequences' numbers are once it is on its way."""

from __future__ import annotations

from ringserve.engine.prefix_sharing import PrefixSharing
from ringserve.engine.scheduler_step import StepPlan, StepRecord
from ringserve.engine.step_time import StepShape, pairs


def book_step(
    plan: StepPlan, step_id: int, now_ns: int, page_size: int, prefixes: PrefixSharing, has_swaps: bool
) -> StepRecord:
    """The step is final: its tokens count as computed, what it draws as known, pages that it fills can be found."""
    slots, samples = [], []
    num_prompt_tokens = num_context_tokens = num_pairs = 0
    for sequence, num_tokens in plan.num_tokens.items():
        num_before = sequence.num_computed_tokens
        sequence.num_computed_tokens = num_computed = num_before + num_tokens
        known = sequence.num_known_tokens
        fills = (sequence.num_registered_pages + 1) * page_size
        if num_computed >= fills and known - sequence.num_pending_tokens >= fills and prefixes.enabled:
            prefixes.register(sequence)
        slots.append(sequence.slot)
        samples.append(num_computed == known)
        if num_computed == known:
            sequence.num_pending_tokens += 1
            sequence.num_known_tokens = known + 1
        num_context_tokens += num_computed
        if num_tokens > 1:
            num_prompt_tokens += num_tokens
            num_pairs += pairs(num_before, num_tokens)
    counts = list(plan.num_tokens.values())
    shape = StepShape(len(counts), sum(counts), num_prompt_tokens, num_context_tokens, num_pairs)
    return StepRecord(step_id, now_ns, list(plan.num_tokens), slots, counts, samples, shape, has_swaps)
