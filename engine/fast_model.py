"""A model that the fast path serves: packed weights, checked now or at an earlier start."""

from __future__ import annotations

from dataclasses import dataclass

from ringserve.engine.decoder_weights import DecoderWeights
from ringserve.engine.fast_decoder import FastDecoder, Pages
from ringserve.engine.kv_layout import LayerKV
from ringserve.kernels.cpu.features import Level


@dataclass(frozen=True)
class FastModel:
    """See the module."""

    weights: DecoderWeights
    windows: list[int]
    level: Level
    max_positions: int
    """Of the longest sequence that it was checked for."""

    @property
    def layers(self) -> list[LayerKV]:
        """What each layer keeps for a token."""
        shape = self.weights.shape
        return [LayerKV(shape.kv_heads, shape.head_dim, shape.head_dim)] * shape.layers

    def decoder(self, pool: Pages, num_threads: int, max_tokens: int, max_positions: int | None = None) -> FastDecoder:
        """Ready to compute, on ``pool``, steps of ``max_tokens`` tokens of sequences no longer than
        ``max_positions``."""
        positions = self.max_positions if max_positions is None else max_positions
        return FastDecoder(self.weights, pool, self.windows, num_threads, self.level, max_tokens, positions)
