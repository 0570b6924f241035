"""One step of the model: what ``SchedulerOutput`` asks for, in ``ModelRunnerOutput``'s words.

For each slot the runner keeps all token ids, how many of them are computed, and the block table (``slot_table``); the
sampler keeps the rest. It appends every token that it samples itself, so that the next step, planned before this one's
result was read, can feed it. It decides nothing: a sequence that has ended computes what the scheduler had planned for
it, and the scheduler throws the token away.

How logits are computed is the business of a ``Forward``: transformers' modelling code (``torch_forward``) or the fast
path (``fast_forward``). A sequence with ``max_tokens`` 0 computes its prompt and samples nothing: it never has a row in
the result.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from ringserve.engine.page_swaps import apply_swaps
from ringserve.engine.sampler import Sampler
from ringserve.engine.slot_table import SlotTable
from ringserve.messages.columns import pack_i32
from ringserve.messages.logprobs import LogprobColumns, SlotPromptLogprobs
from ringserve.messages.steps import ModelRunnerOutput, NewSequence, SchedulerOutput

if TYPE_CHECKING:
    from ringserve.engine.swap_pool import SwapPool

_NO_LOGITS: NDArray[np.float32] = np.empty((0, 0), dtype=np.float32)


class Forward(Protocol):
    """Computes a step's tokens."""

    def forward(
        self, table: SlotTable, slots: NDArray[np.int32], counts: NDArray[np.int32], wanted: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """Compute ``counts[i]`` tokens of ``slots[i]`` after those computed, write their keys and values into the
        pages, and return float32 logits [len(wanted), vocab_size] of the step's tokens ``wanted`` (numbered through all
        rows). They may be overwritten by the next step."""

    def best_tokens(self) -> list[int] | None:
        """The column of the largest logit in each row that ``forward`` returned last, as ``argmax`` finds it; None
        where that was not computed on the way."""

    def close(self) -> None:
        """Give back threads."""


@dataclass
class _Plan:
    """How far a step goes, and which of its logits are for what."""

    stops: NDArray[np.int64]
    """Of each row: how many of its slot's tokens are computed after the step."""
    sampling: NDArray[np.int32]
    """Slots that come to their end and draw a token."""
    logit_rows: NDArray[np.intp]
    """The row of the logits of each."""
    prompts: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(slot, first position computed, first row of the logits, how many rows)."""


class ModelRunner:
    """Forward pass, sampler and the slots' state. As a ``Runner`` it computes a step as it is submitted."""

    max_in_flight = 1

    def __init__(self, forward: Forward, page_size: int, sampler: Sampler, swap_pool: SwapPool | None = None) -> None:
        self._forward = forward
        self._page_size = page_size
        self._sampler = sampler
        self._swap_pool = swap_pool
        self._table = SlotTable()
        self._results: deque[ModelRunnerOutput] = deque()

    @property
    def num_in_flight(self) -> int:
        """Results that were not collected."""
        return len(self._results)

    def submit(self, output: SchedulerOutput, received_ns: int = 0) -> None:
        """Run one step."""
        self._results.append(self.execute(output, received_ns))

    def is_ready(self) -> bool:
        """Whether there is a result."""
        return bool(self._results)

    def collect(self) -> ModelRunnerOutput:
        """The oldest result."""
        return self._results.popleft()

    def execute(self, output: SchedulerOutput, received_ns: int = 0) -> ModelRunnerOutput:
        """Run one step. A message that does not fit the slots' state raises: the two processes disagree."""
        started_ns = time.monotonic_ns()
        apply_swaps(self._swap_pool, output)
        slots, counts = self._apply(output)
        plan, wanted = self._plan(slots, counts)
        logits = self._forward.forward(self._table, slots, counts, wanted) if len(slots) else _NO_LOGITS
        self._table.computed[slots] = plan.stops
        prompt_logprobs = self._prompt_logprobs(plan, logits)
        sampled_slots, token_ids, logprobs, failed = self._sample(plan, logits)
        return ModelRunnerOutput(
            step_id=output.step_id,
            slots=pack_i32(sampled_slots),
            token_ids=pack_i32(token_ids),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            received_ns=received_ns,
            started_ns=started_ns,
            sent_ns=time.monotonic_ns(),
            failed_slots=failed,
        )

    def close(self) -> None:
        """Give back threads. Nothing may be executed afterwards."""
        self._forward.close()

    def _apply(self, output: SchedulerOutput) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Bring the slots up to date; the rows' slots and token counts."""
        return self._table.apply(output, self._page_size, self._start)

    def _start(self, new: NewSequence) -> None:
        num_prompt = int(self._table.num_prompt[new.slot])
        self._sampler.reset(new.slot, new.sampling, new.choice, self._table.known_ids(new.slot), num_prompt)

    def _plan(self, slots: NDArray[np.int32], counts: NDArray[np.int32]) -> tuple[_Plan, NDArray[np.int32]]:
        """Who gets logits, and the step's tokens that they belong to."""
        table = self._table
        starts = table.computed[slots]
        stops = starts + counts
        ends = counts.cumsum(dtype=np.int32)
        draws = (stops == table.length[slots]) & table.samples[slots]
        asks = table.wants_prompt[slots]
        if asks.any():
            asks &= starts < table.num_prompt[slots]
        if not asks.any():  # the usual step
            (rows,) = draws.nonzero()
            return _Plan(stops, slots[rows], np.arange(len(rows))), ends[rows] - 1
        plan = _Plan(stops, slots[draws], np.zeros(0, np.intp))
        wanted: list[int] = []
        logit_rows: list[int] = []
        for row, slot in enumerate(slots.tolist()):
            first = int(ends[row] - counts[row])
            if asks[row]:
                # The logits at position p are about token p + 1; the prompt's last ones are about no prompt token.
                start = int(starts[row])
                about = min(int(stops[row]), int(table.num_prompt[slot]) - 1) - start
                plan.prompts.append((slot, start, len(wanted), about))
                wanted.extend(range(first, first + about))
            if draws[row]:
                logit_rows.append(len(wanted))
                wanted.append(int(ends[row]) - 1)
        plan.logit_rows = np.array(logit_rows, dtype=np.intp)
        return plan, np.array(wanted, dtype=np.int32)

    def _prompt_logprobs(self, plan: _Plan, logits: NDArray[np.float32]) -> tuple[SlotPromptLogprobs, ...]:
        results: list[SlotPromptLogprobs] = []
        for slot, start, first, about in plan.prompts:
            columns = LogprobColumns(b"", b"", b"", b"")
            if about > 0:
                columns = self._sampler.prompt_logprobs(
                    logits[first : first + about],
                    self._table.ids[slot, start + 1 : start + 1 + about],
                    self._table.sampling[slot].prompt_logprobs,
                )
            if start == 0:  # the first token of all has none
                counts = pack_i32([0]) + columns.counts
                columns = LogprobColumns(counts, columns.token_ids, columns.values, columns.ranks)
            if columns.counts:
                results.append(SlotPromptLogprobs(slot, start + 1 if start else 0, columns))
        return tuple(results)

    def _sample(
        self, plan: _Plan, logits: NDArray[np.float32]
    ) -> tuple[list[int], list[int], LogprobColumns | None, tuple[tuple[int, str], ...]]:
        """Draw a token for every row that came to its end; the slots' state advances by it."""
        table, slots, rows = self._table, plan.sampling, plan.logit_rows
        if table.failed:
            failed_before = np.array([slot in table.failed for slot in slots.tolist()], dtype=np.bool_)
            gone = slots[failed_before]
            table.append(gone, np.zeros(len(gone), np.int32))
            slots, rows = slots[~failed_before], rows[~failed_before]
        if not len(slots):
            return [], [], None, ()
        # The usual step wants nothing but these rows: no copy.
        whole = len(rows) == len(logits)
        best = self._forward.best_tokens() if whole else None
        names = slots.tolist()
        sampled = self._sampler.sample(names, logits if whole else logits[rows], best)
        if not sampled.failed:
            token_ids = [token for token in sampled.token_ids if token is not None]
            table.append(slots, np.array(token_ids, dtype=np.int32))
            return names, token_ids, sampled.logprobs, ()
        # The scheduler may have planned a row for a failed sequence already: it goes on, with token 0.
        table.append(slots, np.array([token or 0 for token in sampled.token_ids], dtype=np.int32))
        table.failed.update(slot for slot, _ in sampled.failed)
        drawn = [(s, token) for s, token in zip(names, sampled.token_ids, strict=True) if token is not None]
        return [s for s, _ in drawn], [token for _, token in drawn], sampled.logprobs, tuple(sampled.failed)
