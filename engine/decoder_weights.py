"""A decoder's weights in the form in which the fast path on CPUs reads them: types, without the means to fill them.

``fast_weights`` fills them from a loaded model, ``kept_model`` from what an earlier start has kept. This module needs
neither torch nor the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class DecoderShape:
    """Sizes and numbers of a decoder."""

    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scale: float
    """Of the products of queries and keys."""

    @property
    def qkv_columns(self) -> int:
        """Width of the fused projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


@dataclass(frozen=True)
class Linear:
    """A linear layer, packed."""

    n: int
    k: int
    k_pad: int
    int8: bool
    weight: NDArray[Any]
    bias: NDArray[np.float32]
    """[n, padded to whole panels]."""
    scales: NDArray[np.uint16] | None = None
    factors: NDArray[np.float32] | None = None
    """Of the inputs, [k_pad]."""


@dataclass(frozen=True)
class Source:
    """Where a linear layer's numbers come from; read only if they are wanted."""

    name: str
    n: int
    k: int
    weight: Callable[[], NDArray[np.uint16]]
    """bfloat16 [n, k]."""
    bias: Callable[[], NDArray[np.float32] | None]
    """[n]."""
    module: Any
    """The torch module whose inputs are the layer's."""


InputSizes = Mapping[Any, NDArray[np.float32]]
"""Root mean square of each input of a linear layer (a torch module), [in_features]. Layers without tokens are
missing."""
Pack = Callable[[Source], Linear]


@dataclass(frozen=True)
class Rotary:
    """A rotary embedding whose frequencies do not depend on the sequence."""

    frequencies: NDArray[np.float32]
    """[head_dim / 2]: radians from one position to the next."""
    scaling: float
    """Of cosines and sines (yarn)."""

    def tables(self, positions: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cosines and sines [positions, head_dim / 2]. Angles are float32 products, as the model's own."""
        angles = (np.arange(positions, dtype=np.float32)[:, None] * self.frequencies[None]).astype(np.float64)
        return (
            np.ascontiguousarray(np.cos(angles) * self.scaling, dtype=np.float32),
            np.ascontiguousarray(np.sin(angles) * self.scaling, dtype=np.float32),
        )


@dataclass(frozen=True)
class LayerWeights:
    """One layer."""

    input_norm: NDArray[np.float32]
    qkv: Linear
    q_norm: NDArray[np.float32] | None
    k_norm: NDArray[np.float32] | None
    output: Linear
    mlp_norm: NDArray[np.float32]
    gate_up: Linear
    """Panels of gate and up columns take turns."""
    down: Linear


@dataclass(frozen=True)
class DecoderWeights:
    """A whole decoder."""

    shape: DecoderShape
    embedding: NDArray[np.uint16]
    """bfloat16 [vocab_size, hidden]."""
    layers: tuple[LayerWeights, ...]
    norm: NDArray[np.float32]
    head: Linear
    exact_head: NDArray[np.uint16] | None
    """bfloat16 [vocab_size, hidden]: the output layer's weights beside quantised ones. A tied model's embedding."""
    rotary: Rotary
