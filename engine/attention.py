"""Our attention, plugged into transformers' attention interface.

transformers' modelling code computes everything of a layer but the attention itself, which it looks up by name.
``register_attention`` puts one function under ``ATTENTION_NAME``; models are loaded with that name. The whole step is
one packed row: queries arrive as ``[1, heads, tokens, dim]`` with all sequences of the step one after the other, no
mask is built for a name that transformers does not know, and the step's ``AttentionContext`` travels through the model
as the keyword ``attention_context``. What to do with a layer's queries, keys and values is the context's business:
serving writes and reads pages, tracing records shapes.

Nothing is swallowed: a keyword that is neither handled nor known to be without effect refuses the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from ringserve.engine.kv_pool import KVPool, LayerKV
from ringserve.engine.model_error import ModelError
from ringserve.kernels.paged_attention import PagedBatch, paged_attention, write_kv

ATTENTION_NAME = "ringserve_paged"

NEUTRAL_KEYWORDS = frozenset(
    {
        "position_ids",  # rotary embeddings are applied before
        "position_embeddings",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
    }
)
"""What modelling code hands on besides; it does not change what attention computes over our packed row."""


@dataclass(frozen=True)
class AttentionOptions:
    """How one layer attends."""

    scale: float
    window: int | None
    """A query at position i sees the keys of positions (i - window, i]."""
    softcap: float | None
    sinks: torch.Tensor | None
    """[heads]: one more logit in each head's softmax, with no value."""


class AttentionContext(Protocol):
    """What a step does in every attention layer."""

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """query [T, H, D], key [T, KVH, D], value [T, KVH, Dv] -> [T, H, Dv]."""


@dataclass
class TracingContext:
    """Records the layers in the order of their calls; every attention gives zeros.

    Zeros cut the only path on which tokens may see one another, so a forward in this context also tells whether there
    is another one.
    """

    layers: dict[nn.Module, LayerKV] = field(default_factory=dict)

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        if module in self.layers:
            raise ModelError("one attention layer is used several times in a pass, which the KV cache cannot serve")
        if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
            raise ModelError(
                f"attention with {query.shape[1]} query, {key.shape[1]} key and {value.shape[1]} value heads is unknown"
            )
        self.layers[module] = LayerKV(kv_heads=key.shape[1], key_dim=key.shape[2], value_dim=value.shape[2])
        return query.new_zeros((query.shape[0], query.shape[1], value.shape[2]))


@dataclass
class PagedContext:
    """Serving: write the step's keys and values into the pages, then attend over the block tables."""

    pool: KVPool
    index_of: Mapping[nn.Module, int]
    """The pool's layer of each attention module, as traced."""
    batch: PagedBatch
    slot_mapping: torch.Tensor
    """int64 [T]: page * page_size + offset of each token."""

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        index = self.index_of[module]
        k_pages, v_pages = self.pool.layer(index)
        scales = self.pool.scales(index)
        write_kv(k_pages, v_pages, key, value, self.slot_mapping, scales)
        return paged_attention(
            query,
            k_pages,
            v_pages,
            self.batch,
            options.scale,
            window=options.window,
            softcap=options.softcap,
            sinks=options.sinks,
            scales=scales,
        )


def index_layers(layers: Sequence[nn.Module]) -> dict[nn.Module, int]:
    """The pool's layer of each traced module."""
    return {module: index for index, module in enumerate(layers)}


def interface_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    attention_context: AttentionContext | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' calling convention: [1, H, T, D], [1, KVH, T, D], [1, KVH, T, Dv] -> ([1, T, H, Dv], None)."""
    if attention_context is None:
        raise ModelError("the model's code does not hand keywords on to its attention")
    if attention_mask is not None:
        raise ModelError("the model's code makes an attention mask of its own")
    if dropout:
        raise ModelError("attention dropout is switched on")
    if is_causal is False:
        raise ModelError("the model has attention that is not causal")
    for name, given in keywords.items():
        if given is not None and name not in NEUTRAL_KEYWORDS:
            raise ModelError(f"the model's attention takes '{name}', which the paged attention does not know")
    if query.shape[0] != 1:
        raise ModelError("the model's code changes the batch dimension before its attention")
    options = AttentionOptions(
        scale=float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        window=None if sliding_window is None else int(sliding_window),
        softcap=None if softcap is None else float(softcap),
        sinks=s_aux,
    )
    out = attention_context.attend(
        module, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), options
    )
    return out.unsqueeze(0), None


def register_attention() -> None:
    """Make ``ATTENTION_NAME`` known to transformers. Registering again changes nothing."""
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, interface_attention)
