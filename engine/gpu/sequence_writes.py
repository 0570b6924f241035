"""A sequence's row of the device's state: what is written when it gets its slot, and nothing of it later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringserve.engine.gpu.device_state import DeviceState, StateWidths
from ringserve.engine.sampler import end_ids, has_penalties, known_biases
from ringserve.kernels.gpu.sampler_state import IN_PROMPT
from ringserve.messages.steps import NewSequence

_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class SlotValues:
    """One sequence's columns."""

    slot: int
    scalars: dict[str, Any]
    """By column."""
    ends: NDArray[np.int64]
    bias_ids: NDArray[np.int64]
    bias_values: NDArray[np.float32]
    counted_ids: NDArray[np.int64]
    """Tokens that occurred, where there are penalties."""
    counts: NDArray[np.int32]
    """How: see ``IN_PROMPT``."""

    @property
    def counts_tokens(self) -> bool:
        """Whether the slot's row of token_counts is used; it must be cleared before it is written."""
        return int(self.scalars["count_rows"]) >= 0

    @property
    def num_logprobs(self) -> int:
        """Likely tokens asked for beside the token itself; -1: no log probabilities."""
        return int(self.scalars["logprob_ks"])

    @classmethod
    def of(cls, new: NewSequence, eos_token_ids: Sequence[int], vocab_size: int) -> SlotValues:
        """A pure function of the message: a sequence that is sent again goes on as it would have."""
        sampling = new.sampling
        ids = np.frombuffer(new.token_ids, dtype=np.int32)
        ends = end_ids(sampling, eos_token_ids, vocab_size) if sampling.min_tokens > 0 else np.empty(0, np.int64)
        bias_ids, bias_values = known_biases(sampling, vocab_size)
        # The kernel adds all that it finds; of an id that came twice the last value counts.
        _, last = np.unique(bias_ids[::-1], return_index=True)
        kept = len(bias_ids) - 1 - last
        penalized = has_penalties(sampling)
        counted, counts = _token_counts(ids, new.num_prompt_tokens) if penalized else (np.empty(0, np.int64),) * 2
        seed = sampling.seed & (1 << 64) - 1
        scalars = {
            "temperatures": sampling.temperature,
            "top_ks": min(sampling.top_k, vocab_size),
            "top_ps": sampling.top_p,
            "min_ps": sampling.min_p,
            "seeds": seed - (1 << 64) if seed >> 63 else seed,
            "choices": new.choice,
            "lengths": len(ids),
            "last_tokens": int(ids[-1]),
            "hide_ends_before": min(new.num_prompt_tokens + sampling.min_tokens, _LARGEST) if len(ends) else 0,
            "num_ends": len(ends),
            "num_biases": len(kept),
            "count_rows": new.slot if penalized else -1,
            "repetition": sampling.repetition_penalty,
            "presence": sampling.presence_penalty,
            "frequency": sampling.frequency_penalty,
            "logprob_ks": min(sampling.logprobs, vocab_size),
        }
        return cls(new.slot, scalars, ends, bias_ids[kept], bias_values[kept], counted, counts.astype(np.int32))

    def widths(self, present: StateWidths) -> StateWidths:
        """Wide enough for this sequence."""
        return present.grown(len(self.ends), len(self.bias_ids), max(0, self.num_logprobs))

    def writes(self, state: DeviceState) -> list[tuple[NDArray[np.int32], NDArray[np.int32]]]:
        """(addresses, words), in pieces; no address comes twice."""
        slot = self.slot
        pieces = [state.writes(name, slot, value) for name, value in self.scalars.items()]
        pieces.append(state.writes("end_ids", slot, self.ends))
        pieces.append(state.writes("bias_ids", slot, self.bias_ids))
        pieces.append(state.writes("bias_values", slot, self.bias_values))
        if len(self.counted_ids):
            rows = np.full(len(self.counted_ids), slot, dtype=np.int64)
            pieces.append((state.addresses("token_counts", rows, self.counted_ids), self.counts))
        return pieces


def _token_counts(ids: NDArray[np.int32], num_prompt: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Distinct ids, and how each occurred."""
    distinct, places = np.unique(ids, return_inverse=True)
    counts = np.bincount(places[num_prompt:], minlength=len(distinct)).astype(np.int64)
    counts[places[:num_prompt]] |= IN_PROMPT
    return distinct.astype(np.int64), counts
