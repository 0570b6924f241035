"""A planned step as the executor is told of it."""

from __future__ import annotations

from ringserve.engine.scheduler_step import PlannedRow, StepPlan
from ringserve.engine.sequence import Sequence
from ringserve.messages import NewSequence, SchedulerOutput, pack_i32


def step_message(
    step_id: int, plan: StepPlan, rows: list[PlannedRow], freed_slots: list[int], now_ns: int
) -> SchedulerOutput:
    """Columns, in the order of ``rows``."""
    pages = [plan.new_pages[row.sequence] for row in rows]
    return SchedulerOutput(
        step_id=step_id,
        new_sequences=tuple([_new_sequence(each, num_cached) for each, num_cached in plan.admitted.items()]),
        slots=pack_i32([row.slot for row in rows]),
        num_tokens=pack_i32([row.num_tokens for row in rows]),
        new_page_counts=pack_i32([len(each) for each in pages]),
        new_pages=pack_i32([page for each in pages for page in each]),
        freed_slots=pack_i32(freed_slots),
        sent_ns=now_ns,
    )


def _new_sequence(sequence: Sequence, num_cached_tokens: int) -> NewSequence:
    request = sequence.request
    return NewSequence(
        slot=sequence.slot,
        token_ids=request.prompt_token_ids + sequence.output_token_ids.tobytes(),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=num_cached_tokens,
        choice=sequence.choice,
        sampling=sequence.sampling,
        max_tokens=min(request.max_tokens, request.max_total_tokens - request.num_prompt_tokens),
    )
