"""What the device is to do in one step, and where in the words that the host sent lies what it needs for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ChunkLayout:
    """A step with chunks: how many of what, and where it lies in the packed words.

    ::

        | token ids, positions, slots [3, chunk tokens] | chunk starts | wanted | prompt tokens | prompt ks |
    """

    num_decodes: int
    num_draws: int
    """Rows that draw a token: the first ones."""
    chunk_lens: tuple[int, ...]
    num_wanted: int
    """Tokens whose logits are wanted: first of the rows that draw, then those that prompt log probabilities are
    of."""

    @property
    def num_rows(self) -> int:
        return self.num_decodes + len(self.chunk_lens)

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + sum(self.chunk_lens)

    @property
    def num_prompt_logits(self) -> int:
        return self.num_wanted - self.num_draws

    def split(self, words: torch.Tensor) -> list[torch.Tensor]:
        """The parts."""
        sizes = [3 * sum(self.chunk_lens), len(self.chunk_lens) + 1, self.num_wanted]
        sizes += [self.num_wanted if self.num_prompt_logits else 0] * 2
        return list(torch.split(words, sizes))


@dataclass(frozen=True)
class StepWork:
    """Everything of one step; nothing here changes once the step is submitted.

    ::

        inputs   | writes [n, 2] | slots whose token counts are cleared | chunks |
        results  | tokens | log probabilities of the rows that draw | of the prompts |
    """

    inputs: torch.Tensor
    """int32, on the host."""
    num_writes: int
    num_cleared: int
    layout: ChunkLayout | None
    """Of the chunks; None where all rows decode."""
    decode: Callable[[], None] | None
    """Where all rows decode: a graph's launch, or launches. None where there are chunks, or no rows."""
    results: torch.Tensor
    """int32, on the host."""
    num_draws: int
    num_logprobs: int
    """Rows that log probabilities are reported of: all that draw, or none."""
    prompt_most: int
    """Likely tokens of a prompt's token for which there is room."""
