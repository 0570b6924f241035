"""A model that was loaded and checked for a CPU, by whichever path, as the rest of the start needs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ringserve.engine.fast_model import FastModel
from ringserve.engine.kv_layout import LayerKV
from ringserve.engine.model_runner import Forward
from ringserve.messages.sampling import SamplingDefaults

if TYPE_CHECKING:
    from ringserve.engine.kv_pool import KVPool


class GeneralPath(Protocol):
    """transformers' code, which is ready to be given its pages."""

    def forward(self, pool: KVPool) -> Forward:
        """Over these pages."""

    def explain(self, error: Exception) -> None:
        """Raises ModelError where the first step failed for a reason that the user can do something about."""


@dataclass(frozen=True)
class CpuModel:
    """See the module."""

    architecture: str
    eos_token_ids: tuple[int, ...]
    defaults: SamplingDefaults
    max_model_len: int
    vocab_size: int
    layers: Sequence[LayerKV]
    path: FastModel | GeneralPath
