"""Models that need no weights: the logits after a token are a function of all tokens up to it.

``ContextModel`` finds these tokens where a model on a device would find its keys and values, in pages, through slots
and block tables; ``ContextForward`` reads the CPU runner's table. So the two runners must give the same tokens, and a
page, position, length or slot that is wrong gives others.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ringserve.engine.gpu.step_inputs import StepInputs
from ringserve.engine.kv_pool import KVPool, LayerKV
from ringserve.engine.slot_table import SlotTable

NUM_PATTERNS = 997
UNWRITTEN = -(1 << 20)


class Patterns:
    """Logits by context. A context with the token ``poison`` has none that are finite."""

    def __init__(self, vocab_size: int, seed: int = 0, poison: int = -1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vocab_size = vocab_size
        self.poison = poison
        self._rows = torch.randn(NUM_PATTERNS, vocab_size, generator=generator) * 3

    def logits(self, context: torch.Tensor, last: int) -> torch.Tensor:
        """[last, vocab]: after each of the last tokens of ``context`` (int64)."""
        weights = torch.arange(1, len(context) + 1) * 31 + 7
        numbers = torch.cumsum((context + 1) * weights, 0) % NUM_PATTERNS
        rows = self._rows[numbers[-last:]].clone()
        poisoned = torch.cumsum((context == self.poison).long(), 0)[-last:] > 0
        rows[poisoned] = torch.nan
        return rows

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """What a greedy request must come to."""
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.logits(torch.tensor(ids), 1)[0].argmax()))
        return ids[len(prompt) :]


class ContextModel:
    """A ``DeviceModel``; its pool's keys are token ids."""

    def __init__(self, patterns: Patterns, num_pages: int, page_size: int) -> None:
        self._patterns = patterns
        self._page_size = page_size
        self.pool = KVPool([LayerKV(1, 1, 1)], num_pages, page_size, "float32")
        self._pages = self.pool.layer(0)[0].view(num_pages + 1, page_size)
        self._pages.fill_(UNWRITTEN)

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        assert inputs.chunk_start.tolist()[-1] == sum(inputs.chunk_lens)
        written = inputs.slot_mapping >= 0
        self._pages.view(-1)[inputs.slot_mapping[written].long()] = inputs.token_ids[written].float()
        rows: list[torch.Tensor] = []
        first = 0
        lens = [1] * inputs.num_decodes + list(inputs.chunk_lens)
        for row, (count, length) in enumerate(zip(lens, inputs.seq_lens.tolist(), strict=True)):
            positions = inputs.positions[first : first + count].tolist()
            mapping = inputs.slot_mapping[first : first + count]
            first += count
            if length == 0:
                assert (positions, mapping.tolist(), int(inputs.block_table[row, 0])) == ([0], [-1], 0)
                rows.append(torch.full((1, self._patterns.vocab_size), torch.nan))
                continue
            if bool((mapping < 0).all()):  # a warm-up
                rows.append(torch.zeros(count, self._patterns.vocab_size))
                continue
            assert positions == list(range(length - count, length))
            table = inputs.block_table[row, : -(-length // self._page_size)].long()
            context = self._pages[table].reshape(-1)[:length].long()
            assert int(context.min()) >= 0, "a slot that nobody wrote is read"
            rows.append(self._patterns.logits(context, count))
        logits = torch.cat(rows)
        return logits if inputs.wanted is None else logits[inputs.wanted]


class ContextForward:
    """A ``model_runner.Forward`` with the same logits."""

    def __init__(self, patterns: Patterns) -> None:
        self._patterns = patterns

    def forward(
        self, table: SlotTable, slots: NDArray[np.int32], counts: NDArray[np.int32], wanted: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        rows = []
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            context = torch.from_numpy(table.ids[slot, : table.computed[slot] + count].astype(np.int64))
            rows.append(self._patterns.logits(context, count))
        logits: NDArray[np.float32] = torch.cat(rows)[torch.from_numpy(wanted.astype(np.int64))].numpy()
        return logits

    def best_tokens(self) -> None:
        """Left to the sampler."""

    def close(self) -> None:
        """Nothing to end."""
