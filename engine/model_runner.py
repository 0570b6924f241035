"""One step of the model: what ``SchedulerOutput`` asks for, in ``ModelRunnerOutput``'s words.

For each slot the runner keeps all token ids, how many of them are computed, and the block table; the sampler keeps the
rest. It appends every token that it samples itself, so that the next step, planned before this one's result was read,
can feed it. It decides nothing: a sequence that has ended computes what the scheduler had planned for it, and the
scheduler throws the token away.

All sequences of a step are one packed row ``[1, tokens]``; the attention reads the pages through ``PagedBatch``.
A sequence with ``max_tokens`` 0 computes its prompt and samples nothing: it never has a row in the result.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ringserve.engine.attention import PagedContext, index_layers
from ringserve.engine.kv_pool import KVPool
from ringserve.engine.sampler import Sampler
from ringserve.kernels.paged_attention import PagedBatch, Workspace
from ringserve.messages import (
    LogprobColumns,
    ModelRunnerOutput,
    NewSequence,
    SamplingParams,
    SchedulerOutput,
    SlotPromptLogprobs,
    pack_i32,
    unpack_i32,
)

MIN_ROWS = {torch.bfloat16: 2, torch.float32: 4}
"""Fewest rows of a step. With fewer, the matrix libraries take other routines, which add in another order: the same
sequence would get other logits alone than among others. Seen with oneDNN's bfloat16 and MKL's float32 products; at this
many rows and above, a row's result was the same whatever the number of rows. It costs a lone decode 0 to 20 %."""

PADDING_TABLE = torch.zeros(1, dtype=torch.int64)
"""Padding tokens live in the reserved page."""

_NO_LOGITS: NDArray[np.float32] = np.empty((0, 0), dtype=np.float32)


class SlotState:
    """A sequence, as the executor knows it."""

    def __init__(self, new: NewSequence) -> None:
        ids = np.frombuffer(new.token_ids, dtype=np.int32)
        self.length = len(ids)
        self.ids = np.empty(max(2 * self.length, 256), dtype=np.int32)
        self.ids[: self.length] = ids
        self.num_prompt_tokens = new.num_prompt_tokens
        self.num_computed = new.num_computed_tokens
        self.choice = new.choice
        self.sampling: SamplingParams = new.sampling
        self.samples = new.max_tokens > 0
        self.failed = False
        """Sampling failed: later rows, planned before the scheduler knew, compute and yield nothing."""
        self.pages: list[int] = []
        self.table = torch.empty(0, dtype=torch.int64)

    def append(self, token_id: int) -> None:
        if self.length == len(self.ids):
            self.ids = np.concatenate([self.ids, np.empty_like(self.ids)])
        self.ids[self.length] = token_id
        self.length += 1

    def add_pages(self, pages: Sequence[int]) -> None:
        if pages:
            self.pages.extend(pages)
            self.table = torch.tensor(self.pages, dtype=torch.int64)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """They are the same for every choice; the first one has them."""
        return self.sampling.prompt_logprobs >= 0 and self.choice == 0


class ModelRunner:
    """Model, KV pool, sampler and the slots' state."""

    def __init__(
        self, model: nn.Module, attention_modules: Sequence[nn.Module], pool: KVPool, sampler: Sampler
    ) -> None:
        self._model = model
        self._index_of: Mapping[nn.Module, int] = index_layers(attention_modules)
        self._pool = pool
        self._page_size = pool.page_size
        self._min_rows = MIN_ROWS[next(model.parameters()).dtype]
        self._sampler = sampler
        self._workspace = Workspace()
        self._slots: dict[int, SlotState] = {}

    def execute(self, output: SchedulerOutput, received_ns: int = 0) -> ModelRunnerOutput:
        """Run one step. A message that does not fit the slots' state raises: the two processes disagree."""
        started_ns = time.monotonic_ns()
        rows = self._apply(output)
        with torch.inference_mode():
            plan = _Plan()
            logits = self._forward(rows, plan) if rows else _NO_LOGITS
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

    def _apply(self, output: SchedulerOutput) -> list[tuple[int, SlotState, int]]:
        """Bring the slots up to date; (slot, state, tokens) for each row."""
        for slot in unpack_i32(output.freed_slots):
            self._slots.pop(slot, None)
        for new in output.new_sequences:
            state = SlotState(new)
            self._slots[new.slot] = state
            self._sampler.reset(new.slot, new.sampling, new.choice, state.ids[: state.length], new.num_prompt_tokens)
        rows: list[tuple[int, SlotState, int]] = []
        first = 0
        pages = unpack_i32(output.new_pages)
        columns = (unpack_i32(output.slots), unpack_i32(output.num_tokens), unpack_i32(output.new_page_counts))
        for slot, num_tokens, num_pages in zip(*columns, strict=True):
            state = self._slots[slot]
            state.add_pages(pages[first : first + num_pages].tolist())
            first += num_pages
            stop = state.num_computed + num_tokens
            if num_tokens < 1 or stop > state.length or stop > len(state.pages) * self._page_size:
                raise RuntimeError(
                    f"step {output.step_id}, slot {slot}: {num_tokens} tokens after {state.num_computed} of "
                    f"{state.length} known ones, {len(state.pages)} pages of {self._page_size}"
                )
            rows.append((slot, state, num_tokens))
        return rows

    def _forward(self, rows: Sequence[tuple[int, SlotState, int]], plan: _Plan) -> NDArray[np.float32]:
        """Compute the rows' tokens; float32 logits of the positions that somebody wants, in the rows' order."""
        total = sum(num_tokens for _, _, num_tokens in rows)
        padding = max(self._min_rows - total, 0)
        token_ids = np.zeros(total + padding, dtype=np.int64)
        positions = np.empty(total + padding, dtype=np.int64)
        slot_mapping = np.empty(total + padding, dtype=np.int64)
        tables = [state.table for _, state, _ in rows]
        query_start = [0]
        context_lens: list[int] = []
        wanted: list[int] = []
        for slot, state, num_tokens in rows:
            start, stop = state.num_computed, state.num_computed + num_tokens
            first, last = query_start[-1], query_start[-1] + num_tokens
            token_ids[first:last] = state.ids[start:stop]
            span = np.arange(start, stop)
            positions[first:last] = span
            pages = state.table.numpy()[span // self._page_size]
            slot_mapping[first:last] = pages * self._page_size + span % self._page_size
            query_start.append(last)
            context_lens.append(stop)
            if state.wants_prompt_logprobs and start < state.num_prompt_tokens:
                # The logits at position p are about token p + 1; the prompt's last ones are about no prompt token.
                about = min(stop, state.num_prompt_tokens - 1) - start
                plan.prompts.append((slot, state, start, len(wanted), about))
                wanted.extend(range(first, first + about))
            if stop == state.length and state.samples:
                plan.samples.append((slot, state, len(wanted)))
                wanted.append(last - 1)
            state.num_computed = stop
        if padding:
            positions[total:] = slot_mapping[total:] = np.arange(padding)
            query_start.append(total + padding)
            context_lens.append(padding)
            tables.append(PADDING_TABLE)
        kept = wanted + wanted[-1:] * (self._min_rows - len(wanted)) if wanted else []
        batch = PagedBatch(
            query_start=query_start,
            context_lens=context_lens,
            block_tables=tables,
            workspace=self._workspace,
        )
        context = PagedContext(self._pool, self._index_of, batch, torch.from_numpy(slot_mapping))
        logits = self._model(
            input_ids=torch.from_numpy(token_ids)[None],
            position_ids=torch.from_numpy(positions)[None],
            use_cache=False,
            logits_to_keep=torch.tensor(kept, dtype=torch.int64),
            attention_context=context,
        ).logits[0, : len(wanted)]
        result: NDArray[np.float32] = logits.float().numpy()
        return result

    def _prompt_logprobs(self, plan: _Plan, logits: NDArray[np.float32]) -> tuple[SlotPromptLogprobs, ...]:
        results: list[SlotPromptLogprobs] = []
        for slot, state, start, first, about in plan.prompts:
            columns = LogprobColumns(b"", b"", b"", b"")
            if about > 0:
                columns = self._sampler.prompt_logprobs(
                    logits[first : first + about],
                    state.ids[start + 1 : start + 1 + about],
                    state.sampling.prompt_logprobs,
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
        drawing = [entry for entry in plan.samples if not entry[1].failed]
        for _, state, _ in plan.samples:
            if state.failed:
                state.append(0)
        if not drawing:
            return [], [], None, ()
        index = [row for _, _, row in drawing]
        # The usual step wants nothing but these rows: no copy.
        chosen = logits if len(index) == len(logits) else logits[index]
        sampled = self._sampler.sample([slot for slot, _, _ in drawing], chosen)
        slots: list[int] = []
        token_ids: list[int] = []
        for (slot, state, _), token_id in zip(drawing, sampled.token_ids, strict=True):
            if token_id is None:
                state.failed = True
                state.append(0)  # the scheduler may have planned a row for it already
            else:
                state.append(token_id)
                slots.append(slot)
                token_ids.append(token_id)
        return slots, token_ids, sampled.logprobs, tuple(sampled.failed)


class _Plan:
    """Which of a step's logits are for what."""

    def __init__(self) -> None:
        self.samples: list[tuple[int, SlotState, int]] = []
        """(slot, state, row of the logits)."""
        self.prompts: list[tuple[int, SlotState, int, int, int]] = []
        """(slot, state, first position computed, first row of the logits, how many rows)."""
