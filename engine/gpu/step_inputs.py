"""What a model on a device reads in one step. All tensors lie on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class StepInputs:
    """``tokens`` tokens of ``rows`` sequences: first those that decode, one token each, then those with chunks.

    In a step that is captured in a graph all rows decode, and padding rows have length 0, slot -1 and page 0.
    """

    token_ids: torch.Tensor
    """int32 [tokens]."""
    positions: torch.Tensor
    """int32 [tokens]."""
    slot_mapping: torch.Tensor
    """int32 [tokens]: page * page_size + offset, where the token's keys and values go; -1: nowhere."""
    block_table: torch.Tensor
    """int32 [rows, pages]."""
    seq_lens: torch.Tensor
    """int32 [rows]: tokens so far, with this step's; 0: padding."""
    num_decodes: int
    """Rows that have one token."""
    chunk_lens: tuple[int, ...]
    """Tokens of each of the other rows, known to the host."""
    chunk_start: torch.Tensor
    """int32 [chunks + 1]: where each chunk begins among the tokens behind the decoding ones; their number."""
    wanted: torch.Tensor | None
    """int64: the tokens whose logits are wanted, in this order; None: all of them."""


class DeviceModel(Protocol):
    """A model whose keys and values lie in a pool on the device."""

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """Logits [wanted, vocab_size] in the model's type, on the device. Nothing waits for the device; where no row
        has a chunk, nothing depends on more than shapes, so that the launches can be captured."""
