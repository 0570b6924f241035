"""What the sampling kernels know of each slot; lies on the device and is read there, row by row.

A slot's row is written when a sequence gets the slot. ``lengths``, ``last_tokens`` and ``token_counts`` advance on the
device with each token drawn, so that the next step needs nothing from the host. Everything has a fixed address: a
captured graph reads what is there when it runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

IN_PROMPT = 1 << 30
"""Bit of a token count: the token occurs in the prompt. Below it: how often in the answer."""


@dataclass(frozen=True)
class SamplerState:
    """One row for each slot; parameters as ``SamplingParams`` has them."""

    temperatures: torch.Tensor
    """float32 [slots]; 0: the largest logit."""
    top_ks: torch.Tensor
    """int32 [slots]; 0: all."""
    top_ps: torch.Tensor
    """float32 [slots]."""
    min_ps: torch.Tensor
    """float32 [slots]."""
    seeds: torch.Tensor
    """int64 [slots]: the 64 bits of the request's seed."""
    choices: torch.Tensor
    """int32 [slots]."""
    lengths: torch.Tensor
    """int32 [slots]: tokens so far, which is the position of the one to draw."""
    last_tokens: torch.Tensor
    """int32 [slots]."""
    hide_ends_before: torch.Tensor
    """int32 [slots]: as long as ``lengths`` is smaller (min_tokens), no end may be drawn."""
    end_ids: torch.Tensor
    """int32 [slots, most ends]."""
    num_ends: torch.Tensor
    """int32 [slots]."""
    bias_ids: torch.Tensor
    """int32 [slots, most biases], distinct in a row."""
    bias_values: torch.Tensor
    """float32 [slots, most biases]."""
    num_biases: torch.Tensor
    """int32 [slots]."""
    count_rows: torch.Tensor
    """int32 [slots]: the slot's row of token_counts; -1: it has no penalties."""
    repetition: torch.Tensor
    """float32 [slots]."""
    presence: torch.Tensor
    """float64 [slots]."""
    frequency: torch.Tensor
    """float64 [slots]."""
    token_counts: torch.Tensor
    """int32 [rows, vocab]: see IN_PROMPT."""

    @classmethod
    def allocate(
        cls, slots: int, vocab_size: int, device: torch.device, *, count_rows: int, most_ends: int, most_biases: int
    ) -> SamplerState:
        """Greedy rows without penalties. ``count_rows``: how many sequences may have penalties at once."""

        def full(shape: tuple[int, ...], value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        return cls(
            temperatures=full((slots,), 0.0, torch.float32),
            top_ks=full((slots,), 0, torch.int32),
            top_ps=full((slots,), 1.0, torch.float32),
            min_ps=full((slots,), 0.0, torch.float32),
            seeds=full((slots,), 0, torch.int64),
            choices=full((slots,), 0, torch.int32),
            lengths=full((slots,), 0, torch.int32),
            last_tokens=full((slots,), 0, torch.int32),
            hide_ends_before=full((slots,), 0, torch.int32),
            end_ids=full((slots, max(most_ends, 1)), -1, torch.int32),
            num_ends=full((slots,), 0, torch.int32),
            bias_ids=full((slots, max(most_biases, 1)), -1, torch.int32),
            bias_values=full((slots, max(most_biases, 1)), 0.0, torch.float32),
            num_biases=full((slots,), 0, torch.int32),
            count_rows=full((slots,), -1, torch.int32),
            repetition=full((slots,), 1.0, torch.float32),
            presence=full((slots,), 0.0, torch.float64),
            frequency=full((slots,), 0.0, torch.float64),
            token_counts=full((max(count_rows, 1), vocab_size), 0, torch.int32),
        )
