"""A Llama of random weights from this project's kernels: the whole of a decode step on the device, fit for a graph.

It knows no scheduler and no checkpoint. A step reads the slots' state (lengths, last tokens, block table), computes one
token for each row, samples, and leaves the state advanced: nothing passes through the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ringserve.bench.gpu.device import Device
from ringserve.kernels.gpu.add_rms_norm import add_rms_norm
from ringserve.kernels.gpu.draw import draw
from ringserve.kernels.gpu.paged_decode import DecodeScratch, choose_splits, decode_config, paged_decode
from ringserve.kernels.gpu.paged_prefill import PrefillBlocks, paged_prefill, prefill_blocks, prefill_config
from ringserve.kernels.gpu.process_logits import process_logits
from ringserve.kernels.gpu.rope_kv_write import rope_kv_write
from ringserve.kernels.gpu.sampler_state import SamplerState
from ringserve.kernels.gpu.silu_mul import silu_mul

EPS = 1e-5
PAGE = 16


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Llama."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int

    @property
    def parameters(self) -> int:
        """Elements of all weights."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        layer = self.hidden * (qkv + self.heads * self.head_dim + 3 * self.intermediate)
        return self.layers * layer + 2 * self.vocab * self.hidden


LLAMA_8B = ModelShape(32, 4096, 32, 8, 128, 14336, 128_256)
TINY = ModelShape(2, 64, 4, 2, 16, 96, 300)


@dataclass(frozen=True)
class LayerWeights:
    """Of one layer; projections ``[out, in]``."""

    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    input_norm: torch.Tensor
    post_norm: torch.Tensor


class DecodeModel:
    """Weights, pages and state for ``slots`` sequences of at most ``max_len`` tokens."""

    def __init__(self, shape: ModelShape, slots: int, max_len: int, device: Device, seed: int = 0) -> None:
        self.shape, self._device = shape, device
        generator = torch.Generator(device.torch).manual_seed(seed)

        def weight(*size: int) -> torch.Tensor:
            values = torch.empty(size, dtype=device.dtype, device=device.torch)
            return values.normal_(std=size[-1] ** -0.5, generator=generator)

        def ones() -> torch.Tensor:
            return torch.ones(shape.hidden, dtype=device.dtype, device=device.torch)

        qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.layers = [
            LayerWeights(
                weight(qkv, shape.hidden),
                weight(shape.hidden, shape.heads * shape.head_dim),
                weight(2 * shape.intermediate, shape.hidden),
                weight(shape.hidden, shape.intermediate),
                ones(),
                ones(),
            )
            for _ in range(shape.layers)
        ]
        self.embedding, self.head, self.norm = (
            weight(shape.vocab, shape.hidden),
            weight(shape.vocab, shape.hidden),
            ones(),
        )
        pages_each = -(-max_len // PAGE)
        size = (shape.layers, 2, slots * pages_each + 1, shape.kv_heads, PAGE, shape.head_dim)
        self.pages = torch.empty(size, dtype=device.dtype, device=device.torch)
        order = torch.randperm(slots * pages_each, generator=torch.Generator().manual_seed(seed)) + 1
        self.block_table = order.to(torch.int32).view(slots, pages_each).to(device.torch)
        frequencies = 10_000.0 ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = (torch.arange(max_len)[:, None] * frequencies).to(device.torch)
        self.cos, self.sin = angles.cos().float(), angles.sin().float()
        self.state = SamplerState.allocate(slots, shape.vocab, device.torch, count_rows=1, most_ends=1, most_biases=1)
        self.slots = torch.full((slots,), -1, dtype=torch.int32, device=device.torch)
        self.tokens = torch.zeros(slots, dtype=torch.int32, device=device.torch)
        self.logits = torch.empty(slots, shape.vocab, dtype=device.dtype, device=device.torch)
        self._processed = torch.empty(slots, shape.vocab, device=device.torch)
        splits = choose_splits(1, shape.kv_heads, device.num_multiprocessors)
        rows = max(slots, 1)
        self._scratch = DecodeScratch.allocate(rows, shape.heads, splits, shape.head_dim, device.torch)

    def decode(self, rows: int) -> None:
        """One token for each of ``slots[:rows]`` into ``tokens``; -1 pads."""
        slots = self.slots[:rows]
        index = slots.clamp_min(0).long()
        lengths = torch.where(slots >= 0, self.state.lengths[index], 0)
        positions = (lengths - 1).clamp_min(0)
        table = self.block_table[index]
        page = table.gather(1, (positions // PAGE).long()[:, None])[:, 0]
        slot_mapping = torch.where(slots >= 0, page * PAGE + positions % PAGE, -1)
        splits = choose_splits(rows, self.shape.kv_heads, self._device.num_multiprocessors)
        heads, dim = self.shape.heads, self.shape.head_dim
        runs = rows * heads * splits
        scratch = DecodeScratch(
            self._scratch.values.view(-1)[: runs * dim].view(rows, heads, splits, dim),
            self._scratch.log_sums.view(-1)[:runs].view(rows, heads, splits),
        )
        config = decode_config(self._device.architecture, self.pages[0, 0], dim)

        def attend(layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
            keys, values = self.pages[layer]
            paged_decode(q, keys, values, table, lengths, dim**-0.5, out, scratch, config)

        hidden = self._forward(self.state.last_tokens[index], positions, slot_mapping, attend)
        torch.mm(hidden, self.head.T, out=self.logits[:rows])
        process_logits(self.logits[:rows], slots, self.state, self._processed[:rows])
        draw(self._processed[:rows], slots, self.state, self.tokens[:rows])

    def prefill(self, slot: int, token_ids: torch.Tensor, start: int) -> torch.Tensor:
        """Compute ``token_ids`` as tokens ``start ..`` of a slot; logits of the last one ``[1, vocab]``."""
        count = len(token_ids)
        positions = torch.arange(start, start + count, dtype=torch.int32, device=self._device.torch)
        table = self.block_table[slot : slot + 1]
        slot_mapping = table[0][(positions // PAGE).long()] * PAGE + positions % PAGE
        dim = self.shape.head_dim
        config = prefill_config(self._device.architecture, self.pages[0, 0], dim)
        blocks = prefill_blocks([count], config.rows_per_block(self.shape.heads // self.shape.kv_heads))
        on_device = PrefillBlocks(blocks.sequences.to(self._device.torch), blocks.offsets.to(self._device.torch))
        query_start = torch.tensor([0, count], dtype=torch.int32, device=self._device.torch)
        seq_lens = torch.tensor([start + count], dtype=torch.int32, device=self._device.torch)

        def attend(layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
            keys, values = self.pages[layer]
            paged_prefill(q, keys, values, table, query_start, seq_lens, on_device, dim**-0.5, out, config)

        hidden = self._forward(token_ids, positions, slot_mapping, attend)
        return hidden[-1:] @ self.head.T

    def _forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        attend: Callable[[int, torch.Tensor, torch.Tensor], None],
    ) -> torch.Tensor:
        """The layers, up to the last normalisation; ``attend(layer, q, out)``."""
        shape = self.shape
        residual = self.embedding[tokens.long()]
        hidden = torch.empty_like(residual)
        add_rms_norm(residual, None, self.layers[0].input_norm, EPS, hidden)
        rows = len(tokens)
        sizes = [shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.kv_heads * shape.head_dim]
        following = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        for index, (layer, next_norm) in enumerate(zip(self.layers, following, strict=True)):
            q, k, v = torch.split(hidden @ layer.qkv.T, sizes, dim=1)
            q = q.view(rows, shape.heads, shape.head_dim)
            rope_kv_write(
                q,
                k.view(rows, shape.kv_heads, shape.head_dim),
                v.view(rows, shape.kv_heads, shape.head_dim),
                self.cos,
                self.sin,
                positions,
                slot_mapping,
                self.pages[index, 0],
                self.pages[index, 1],
            )
            attention = torch.empty(rows, shape.heads, shape.head_dim, dtype=q.dtype, device=q.device)
            attend(index, q, attention)
            hidden = attention.view(rows, -1) @ layer.o.T
            add_rms_norm(hidden, residual, layer.post_norm, EPS, hidden)
            gated = torch.empty(rows, shape.intermediate, dtype=q.dtype, device=q.device)
            hidden = silu_mul(hidden @ layer.gate_up.T, gated) @ layer.down.T
            add_rms_norm(hidden, residual, next_norm, EPS, hidden)
        return hidden

    def reference_logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """float64 logits of every token of one sequence, on the CPU, with nothing of the above."""
        shape = self.shape

        def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.double().cpu()

        def turn(x: torch.Tensor) -> torch.Tensor:
            cos, sin = (table[: x.shape[0], None].double().cpu() for table in (self.cos, self.sin))
            a, b = x.chunk(2, dim=-1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

        count = len(token_ids)
        hidden = self.embedding.double().cpu()[token_ids.cpu().long()]
        group = shape.heads // shape.kv_heads
        hide = torch.full((count, count), -torch.inf, dtype=torch.float64).triu(1)
        for layer in self.layers:
            projected = norm(hidden, layer.input_norm) @ layer.qkv.double().cpu().T
            heads = projected.view(count, shape.heads + 2 * shape.kv_heads, shape.head_dim)
            q, k, v = torch.split(heads, [shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
            q, k = turn(q), turn(k).repeat_interleave(group, dim=1)
            scores = torch.einsum("qhd,khd->hqk", q, k) * shape.head_dim**-0.5 + hide
            mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(group, dim=1))
            hidden = hidden + mixed.reshape(count, -1) @ layer.o.double().cpu().T
            gate, up = (norm(hidden, layer.post_norm) @ layer.gate_up.double().cpu().T).chunk(2, dim=-1)
            hidden = hidden + (torch.nn.functional.silu(gate) * up) @ layer.down.double().cpu().T
        return norm(hidden, self.norm) @ self.head.double().cpu().T
