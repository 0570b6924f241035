"""Which of a step's rows are what, and what the host has to tell the device of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ringserve.engine.gpu.step_results import PromptPart
from ringserve.engine.gpu.step_work import ChunkLayout
from ringserve.engine.slot_table import SlotTable

_Words = NDArray[np.int32]


@dataclass
class StepPlan:
    """A step's rows in the device's order: those that decode, then chunks that come to their end, then the others."""

    order: NDArray[np.int64]
    """The step's row of each."""
    num_decodes: int
    num_draws: int
    results: list[int]
    """Of each token drawn, in the step's order: its row here."""
    prompts: list[PromptPart] = field(default_factory=list)
    wanted_prompt: list[int] = field(default_factory=list)
    """Tokens of the step, counted through the rows, whose logits are about a prompt's next token."""
    prompt_tokens: list[int] = field(default_factory=list)
    """That next token."""
    prompt_ks: list[int] = field(default_factory=list)


def plan_step(table: SlotTable, slots: _Words, counts: _Words, vocab_size: int) -> StepPlan:
    """Of a step that was applied to ``table`` and is not yet computed. A row decodes where its one token is the slot's
    last, and another is to be drawn; tokens of the others were all sent by the scheduler, since a slot that has drawn
    one has only one to compute."""
    starts = table.computed[slots]
    stops = starts + counts
    draws = (stops == table.length[slots]) & table.samples[slots]
    decodes = draws & (counts == 1)
    order = np.concatenate([np.flatnonzero(decodes), np.flatnonzero(draws & ~decodes), np.flatnonzero(~draws)])
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    plan = StepPlan(order, int(decodes.sum()), int(draws.sum()), place[draws].tolist())
    asks = table.wants_prompt[slots] & (starts < table.num_prompt[slots])
    if asks.any():
        firsts = (np.cumsum(counts[order]) - counts[order])[place]
        for row in np.flatnonzero(asks).tolist():
            _plan_prompt(plan, table, int(slots[row]), int(stops[row]), int(firsts[row]), vocab_size)
    return plan


def _plan_prompt(plan: StepPlan, table: SlotTable, slot: int, stop: int, first_token: int, vocab_size: int) -> None:
    # The logits at position p are about token p + 1; the prompt's last ones are about no prompt token.
    start = int(table.computed[slot])
    about = max(0, min(stop, int(table.num_prompt[slot]) - 1) - start)
    k = min(table.sampling[slot].prompt_logprobs, vocab_size)
    plan.prompts.append(PromptPart(slot, start, plan.num_draws + len(plan.wanted_prompt), about, k))
    plan.wanted_prompt += range(first_token, first_token + about)
    plan.prompt_tokens += table.ids[slot, start + 1 : start + 1 + about].tolist()
    plan.prompt_ks += [k] * about


def pack_chunks(
    table: SlotTable, plan: StepPlan, slots: _Words, counts: _Words, page_size: int
) -> tuple[ChunkLayout, _Words]:
    """A step's chunks as words; slots and counts are in the device's order."""
    first = plan.num_decodes
    lens = counts[first:]
    ids, positions, mapping = [], [], []
    for slot, count in zip(slots[first:].tolist(), lens.tolist(), strict=True):
        start = int(table.computed[slot])
        span = np.arange(start, start + count)
        ids.append(table.ids[slot, start : start + count])
        positions.append(span)
        mapping.append(table.pages[slot, span // page_size] * page_size + span % page_size)
    chunk_start = np.concatenate([[0], np.cumsum(lens)])
    ends = first + chunk_start[1 : 1 + plan.num_draws - first] - 1
    wanted = [*range(first), *ends.tolist(), *plan.wanted_prompt]
    layout = ChunkLayout(first, plan.num_draws, tuple(lens.tolist()), len(wanted))
    parts = [*ids, *positions, *mapping, chunk_start, np.array(wanted, dtype=np.int64)]
    if layout.num_prompt_logits:
        skipped = [-1] * plan.num_draws
        parts += [np.array([*skipped, *plan.prompt_tokens]), np.array([*skipped, *plan.prompt_ks])]
    return layout, np.concatenate(parts).astype(np.int32)
