"""The general path: any model of transformers with our attention plugged in, all sequences in one packed row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ringserve.engine.attention import PagedContext, index_layers
from ringserve.engine.kv_pool import KVPool
from ringserve.engine.linear_team import LinearTeam
from ringserve.engine.slot_table import SlotTable
from ringserve.kernels.paged_attention import PagedBatch, Workspace

MIN_ROWS = {torch.bfloat16: 2, torch.float32: 4}
"""Fewest rows of a step. With fewer, the matrix libraries take other routines, which add in another order: the same
sequence would get other logits alone than among others. Seen with oneDNN's bfloat16 and MKL's float32 products; at this
many rows and above, a row's result was the same whatever the number of rows. It costs a lone decode 0 to 20 %."""

PADDING_TABLE = torch.zeros(1, dtype=torch.int64)
"""Padding tokens live in the reserved page."""


class TorchForward:
    """A transformers model and its pages."""

    def __init__(
        self, model: nn.Module, attention_modules: Sequence[nn.Module], pool: KVPool, team: LinearTeam | None = None
    ) -> None:
        """``team``: computes the model's linear layers, and ends with this."""
        self._team = team
        self._model = model
        self._index_of: Mapping[nn.Module, int] = index_layers(attention_modules)
        self._pool = pool
        self._min_rows = MIN_ROWS[next(model.parameters()).dtype]
        self._workspace = Workspace()

    def forward(
        self, table: SlotTable, slots: NDArray[np.int32], counts: NDArray[np.int32], wanted: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """See ``model_runner.Forward``."""
        page_size = self._pool.page_size
        total = int(counts.sum())
        padding = max(self._min_rows - total, 0)
        token_ids = np.zeros(total + padding, dtype=np.int64)
        positions = np.empty(total + padding, dtype=np.int64)
        slot_mapping = np.empty(total + padding, dtype=np.int64)
        tables: list[torch.Tensor] = []
        query_start = [0]
        context_lens: list[int] = []
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            start = int(table.computed[slot])
            stop = start + count
            first, last = query_start[-1], query_start[-1] + count
            token_ids[first:last] = table.ids[slot, start:stop]
            span = np.arange(start, stop)
            positions[first:last] = span
            pages = table.pages[slot, : table.num_pages[slot]].astype(np.int64)
            slot_mapping[first:last] = pages[span // page_size] * page_size + span % page_size
            tables.append(torch.from_numpy(pages))
            query_start.append(last)
            context_lens.append(stop)
        if padding:
            positions[total:] = slot_mapping[total:] = np.arange(padding)
            query_start.append(total + padding)
            context_lens.append(padding)
            tables.append(PADDING_TABLE)
        kept = wanted.tolist()
        kept += kept[-1:] * (self._min_rows - len(kept))
        batch = PagedBatch(
            query_start=query_start,
            context_lens=context_lens,
            block_tables=tables,
            workspace=self._workspace,
        )
        context = PagedContext(self._pool, self._index_of, batch, torch.from_numpy(slot_mapping))
        with torch.inference_mode():
            logits = self._model(
                input_ids=torch.from_numpy(token_ids)[None],
                position_ids=torch.from_numpy(positions)[None],
                use_cache=False,
                logits_to_keep=torch.tensor(kept, dtype=torch.int64),
                attention_context=context,
            ).logits[0, : len(wanted)]
            result: NDArray[np.float32] = logits.float().numpy()
        return result

    def best_tokens(self) -> list[int] | None:
        """See ``model_runner.Forward``."""
        return None

    def close(self) -> None:
        """End the threads of the linear layers."""
        if self._team is not None:
            self._team.close()
