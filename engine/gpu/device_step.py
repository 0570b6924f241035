"""The device's side of a step: launches and copies over the slots' state, nothing that waits.

All arrays have fixed addresses and full width; a step uses their first rows. A step in which all rows decode depends on
the number of rows alone, so it can be captured in a graph (``decode``); one with chunks gets what the host knows of
them as packed words. Either way the slots have advanced by the tokens drawn: the next step needs nothing from the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from ringserve.engine.gpu.device_state import DeviceState
from ringserve.engine.gpu.step_inputs import DeviceModel, StepInputs
from ringserve.engine.gpu.step_results import logprob_words
from ringserve.engine.gpu.step_work import ChunkLayout, StepWork
from ringserve.kernels.gpu.draw import draw
from ringserve.kernels.gpu.process_logits import process_logits
from ringserve.kernels.gpu.step_rows import RowArrays, step_rows
from ringserve.kernels.gpu.token_logprobs import token_logprobs
from ringserve.kernels.gpu.write_words import write_words


@dataclass(frozen=True)
class StepSizes:
    """What a runner is made for."""

    num_slots: int
    num_rows: int
    """The most that a step may have, with padding."""
    max_len: int
    """Tokens of a sequence: no position is beyond."""
    page_size: int
    max_tokens: int
    """Of a step."""
    vocab_size: int

    @property
    def max_pages(self) -> int:
        """Of a block table."""
        return -(-self.max_len // self.page_size)


@dataclass(frozen=True)
class Logprobs:
    """What ``token_logprobs`` writes."""

    ids: torch.Tensor
    """int32 [rows, 1 + most]."""
    values: torch.Tensor
    """float32 [rows, 1 + most]."""
    ranks: torch.Tensor
    """int32 [rows]."""

    @classmethod
    def allocate(cls, rows: int, most: int, device: torch.device) -> Logprobs:
        """Uninitialised."""
        return cls(
            torch.empty(rows, 1 + most, dtype=torch.int32, device=device),
            torch.empty(rows, 1 + most, dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.int32, device=device),
        )

    @property
    def num_words(self) -> int:
        """That ``copy_to`` takes."""
        return logprob_words(*self.ids.shape)

    def copy_to(self, words: torch.Tensor) -> None:
        """Ranks, ids, values of all rows, one after the other."""
        rows, width = self.ids.shape
        words[:rows].copy_(self.ranks, non_blocking=True)
        words[rows : rows * (1 + width)].view(rows, width).copy_(self.ids, non_blocking=True)
        values = words[rows * (1 + width) : rows * (1 + 2 * width)].view(torch.float32).view(rows, width)
        values.copy_(self.values, non_blocking=True)

    def first(self, rows: int) -> Logprobs:
        """Views of the first rows."""
        return Logprobs(self.ids[:rows], self.values[:rows], self.ranks[:rows])


class DeviceStep:
    """Launches of one model's steps over one state."""

    def __init__(self, model: DeviceModel, sizes: StepSizes, state: DeviceState, device: torch.device) -> None:
        self._model = model
        self._sizes = sizes
        self._device = device
        self._state = state
        rows = sizes.num_rows

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._inputs = ints(3, max(sizes.max_tokens, rows))
        token_ids, positions, slot_mapping = self._inputs
        self._rows = RowArrays(token_ids, positions, slot_mapping, ints(rows), ints(rows, sizes.max_pages), ints(rows))
        self._no_chunks = ints(1)
        self._processed = torch.empty(rows, sizes.vocab_size, dtype=torch.float32, device=device)
        self._tokens = ints(rows)
        """Of the rows that draw; -1: there was nothing to draw from."""
        self._logprobs = Logprobs.allocate(rows, state.widths.logprobs, device)
        """Of rows that asked."""

    def run(self, work: StepWork) -> None:
        """A whole step, from the host's words to the results on the host."""
        sizes = [2 * work.num_writes, work.num_cleared]
        words = torch.empty(len(work.inputs), dtype=torch.int32, device=self._device)
        if len(words):
            words.copy_(work.inputs, non_blocking=True)
        writes, cleared, chunks = torch.split(words, [*sizes, len(words) - sum(sizes)])
        self._write(writes.view(-1, 2), cleared)
        prompts = None
        if work.layout is not None:
            prompts = self._run_chunks(work.layout, chunks, work.prompt_most)
        elif work.decode is not None:
            work.decode()
        if work.num_draws:
            work.results[: work.num_draws].copy_(self._tokens[: work.num_draws], non_blocking=True)
        if work.num_logprobs:
            self._logprobs.first(work.num_logprobs).copy_to(work.results[work.num_draws :])
        if prompts is not None:
            prompts.copy_to(work.results[len(work.results) - prompts.num_words :])

    def use(self, state: DeviceState) -> None:
        """A wider state, from now on, with all that the present one knows."""
        state.copy_from(self._state)
        if state.widths.logprobs != self._state.widths.logprobs:
            self._logprobs = Logprobs.allocate(self._sizes.num_rows, state.widths.logprobs, self._device)
        self._state = state

    def pad_rows(self) -> None:
        """Give no row a slot."""
        self._state.row_slots.fill_(-1)
        self._state.row_lengths.zero_()

    def warm_up_chunks(self, num_tokens: int, most_logits: int) -> None:
        """A step of about so many tokens: prompts that lie nowhere, beside a row of padding that decodes. It compiles
        what such steps need, and takes as much memory as they do. Touches no page but the reserved one; slot 0 must
        never have been used."""
        sizes = self._sizes
        first = 1 if sizes.num_rows > 1 and num_tokens > 1 else 0
        longest = min(num_tokens - first, sizes.max_len)  # tables of angles end there
        lens = [longest] * min((num_tokens - first) // longest, sizes.num_rows - first)
        total = sum(lens)
        self.pad_rows()
        self._state.row_slots[first : first + len(lens)].zero_()
        self._state.row_lengths[first : first + len(lens)].fill_(longest)
        starts = [0, *accumulate(lens)]
        num_logits = min(total, most_logits)
        wanted = [*range(first), *range(first + total - num_logits, first + total)]
        words = [*[0] * total, *[position for n in lens for position in range(n)], *[-1] * total, *starts, *wanted]
        words += [*[-1] * first, *[0] * num_logits] * 2
        layout = ChunkLayout(first, first, tuple(lens), len(wanted))
        packed = torch.tensor(words, dtype=torch.int32).to(self._device)
        self._run_chunks(layout, packed, self._state.widths.logprobs)
        self.pad_rows()

    def warm_up_writes(self, address: int, word: int) -> None:
        """A write, of slot 0, which nobody has."""
        writes = torch.tensor([[address, word]], dtype=torch.int32).to(self._device)
        self._write(writes, torch.zeros(1, dtype=torch.int32, device=self._device))

    def decode(self, rows: int) -> None:
        """One token for each of the first rows. To be captured: nothing but the number of rows is the host's."""
        self._read_rows(rows)
        token_ids, positions, slot_mapping = self._inputs[:, :rows]
        inputs = StepInputs(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            block_table=self._rows.pages[:rows],
            seq_lens=self._rows.seq_lens[:rows],
            num_decodes=rows,
            chunk_lens=(),
            chunk_start=self._no_chunks,
            wanted=None,
        )
        self._draw(self._model.forward(inputs), rows)

    def _write(self, writes: torch.Tensor, cleared: torch.Tensor) -> None:
        """Changes of the state: int32 [n, 2] addresses and words, after the token counts of slots ``cleared`` (int32)
        were set to zero."""
        if len(cleared):
            self._state.sampler.token_counts.index_fill_(0, cleared.long(), 0)
        write_words(writes, self._state.words)

    def _run_chunks(self, layout: ChunkLayout, words: torch.Tensor, most: int) -> Logprobs | None:
        """Rows that decode, then rows with chunks. Log probabilities of the prompts, if any are wanted, with ``most``
        likely tokens; their first ``num_draws`` rows are not written."""
        chunks, chunk_start, wanted, prompt_tokens, prompt_ks = layout.split(words)
        first, num_tokens = layout.num_decodes, layout.num_decodes + sum(layout.chunk_lens)
        self._read_rows(layout.num_rows)
        # After the rows were read: that leaves something behind them.
        self._inputs[:, first:num_tokens].copy_(chunks.view(3, -1))
        token_ids, positions, slot_mapping = self._inputs[:, :num_tokens]
        inputs = StepInputs(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            block_table=self._rows.pages[: layout.num_rows],
            seq_lens=self._rows.seq_lens[: layout.num_rows],
            num_decodes=layout.num_decodes,
            chunk_lens=layout.chunk_lens,
            chunk_start=chunk_start,
            wanted=wanted.long(),
        )
        logits = self._model.forward(inputs)
        if layout.num_draws:
            self._draw(logits, layout.num_draws)
        if not layout.num_prompt_logits:
            return None
        logprobs = Logprobs.allocate(layout.num_wanted, most, self._device)
        # Of all rows, those skipped that draw: a part of the logits would be aligned differently, which compiles anew.
        token_logprobs(logits, prompt_tokens, prompt_ks, logprobs.ids, logprobs.values, logprobs.ranks)
        return logprobs

    def _read_rows(self, rows: int) -> None:
        state = self._state
        step_rows(
            state.row_slots[:rows],
            state.row_lengths,
            state.sampler.lengths,
            state.sampler.last_tokens,
            state.logprob_ks,
            state.block_tables,
            self._sizes.page_size,
            self._rows,
        )

    def _draw(self, logits: torch.Tensor, rows: int) -> None:
        slots, logits = self._state.row_slots[:rows], logits[:rows]
        processed = process_logits(logits, slots, self._state.sampler, self._processed[:rows])
        tokens = draw(processed, slots, self._state.sampler, self._tokens[:rows])
        logprobs = self._logprobs
        token_logprobs(logits, tokens, self._rows.ks, logprobs.ids, logprobs.values, logprobs.ranks)
