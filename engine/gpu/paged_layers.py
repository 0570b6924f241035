"""Attention of a step through the pages of a device: rows that decode by one kernel, rows with chunks by the other.

Both ways of computing a model (``llama_model``, ``transformers_model``) come here with a layer's queries. It knows
pages and rows, no weights.
"""

from __future__ import annotations

import torch

from ringserve.engine.gpu.device import Device
from ringserve.engine.gpu.step_inputs import StepInputs
from ringserve.engine.kv_pool import KVPool
from ringserve.engine.transfer_lane import upload
from ringserve.kernels.gpu.paged_decode import DecodeScratch, choose_splits, decode_config, paged_decode
from ringserve.kernels.gpu.paged_prefill import PrefillBlocks, paged_prefill, prefill_blocks, prefill_config


class StepBlocks:
    """The blocks of a step's chunks on the device, made once for every size of block that its layers ask for."""

    def __init__(self, chunk_lens: tuple[int, ...], device: torch.device) -> None:
        self._chunk_lens = chunk_lens
        self._device = device
        self._made: dict[int, PrefillBlocks] = {}

    def of(self, rows_per_block: int) -> PrefillBlocks:
        """See ``prefill_blocks``."""
        blocks = self._made.get(rows_per_block)
        if blocks is None:
            host = prefill_blocks(self._chunk_lens, rows_per_block)
            blocks = PrefillBlocks(upload(host.sequences, self._device), upload(host.offsets, self._device))
            self._made[rows_per_block] = blocks
        return blocks


class PagedLayers:
    """Attention over ``pool``; one step at a time."""

    def __init__(self, pool: KVPool, device: Device, max_rows: int) -> None:
        self.pool = pool
        self._device = device.torch_device
        self._architecture = device.architecture
        self._num_multiprocessors = device.num_multiprocessors
        self._max_rows = max_rows
        self._values = torch.empty(0, dtype=torch.float32, device=self._device)
        self._log_sums = torch.empty(0, dtype=torch.float32, device=self._device)

    def reserve(self, heads: int, kv_heads: int, value_dim: int) -> None:
        """Scratch for layers of these sizes. It stays where it is from then on, as captured graphs want it."""
        runs = max(
            rows * choose_splits(rows, kv_heads, self._num_multiprocessors) for rows in range(1, self._max_rows + 1)
        )
        runs *= heads
        if runs > self._log_sums.numel():
            self._log_sums = torch.empty(runs, dtype=torch.float32, device=self._device)
        if runs * value_dim > self._values.numel():
            self._values = torch.empty(runs * value_dim, dtype=torch.float32, device=self._device)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        out: torch.Tensor,
        inputs: StepInputs,
        blocks: StepBlocks,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> None:
        """q ``[tokens, heads, D]`` over keys and values of ``layer``, this step's own included, into out ``[tokens,
        heads, Dv]``. Where all rows decode nothing here depends on more than shapes."""
        keys, values = self.pool.layer(layer)
        scales = self.pool.scales(layer)
        heads, kv_heads, value_dim = q.shape[1], keys.shape[1], values.shape[3]
        decodes = inputs.num_decodes
        if decodes:
            paged_decode(
                q[:decodes],
                keys,
                values,
                inputs.block_table[:decodes],
                inputs.seq_lens[:decodes],
                scale,
                out[:decodes],
                self._scratch(decodes, heads, kv_heads, value_dim),
                decode_config(self._architecture, keys, value_dim),
                scales=scales,
                window=window,
                softcap=softcap,
            )
        if inputs.chunk_lens:
            config = prefill_config(self._architecture, keys, value_dim)
            paged_prefill(
                q[decodes:],
                keys,
                values,
                inputs.block_table[decodes:],
                inputs.chunk_start,
                inputs.seq_lens[decodes:],
                blocks.of(config.rows_per_block(heads // kv_heads)),
                scale,
                out[decodes:],
                config,
                scales=scales,
                window=window,
                softcap=softcap,
            )

    def _scratch(self, rows: int, heads: int, kv_heads: int, value_dim: int) -> DecodeScratch:
        splits = choose_splits(rows, kv_heads, self._num_multiprocessors)
        runs = rows * heads * splits
        if rows > self._max_rows or runs > self._log_sums.numel() or runs * value_dim > self._values.numel():
            self._max_rows = max(rows, self._max_rows)
            self.reserve(heads, kv_heads, value_dim)
        return DecodeScratch(
            self._values[: runs * value_dim].view(rows, heads, splits, value_dim),
            self._log_sums[:runs].view(rows, heads, splits),
        )
