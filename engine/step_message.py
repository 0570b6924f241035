"""A planned step as the executor is told of it."""

from __future__ import annotations

from ringserve.engine.scheduler_step import StepPlan, StepRecord
from ringserve.engine.sequence import Sequence
from ringserve.messages.columns import pack_i32
from ringserve.messages.steps import NewSequence, PageSwaps, SchedulerOutput


def step_message(
    record: StepRecord, plan: StepPlan, freed_slots: list[int], swaps: PageSwaps | None
) -> SchedulerOutput:
    """Columns, in the order of the record."""
    new_pages = plan.new_pages
    counts, pages = [0] * len(record.slots), []
    if new_pages:
        for index, sequence in enumerate(record.sequences):
            if (added := new_pages.get(sequence)) is not None:
                counts[index] = len(added)
                pages += added
    return SchedulerOutput(
        step_id=record.step_id,
        new_sequences=tuple([_new_sequence(each, num_cached) for each, num_cached in plan.admitted.items()]),
        slots=pack_i32(record.slots),
        num_tokens=pack_i32(record.num_tokens),
        new_page_counts=pack_i32(counts),
        new_pages=pack_i32(pages),
        freed_slots=pack_i32(freed_slots),
        sent_ns=record.scheduled_ns,
        swaps=swaps,
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
