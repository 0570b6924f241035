"""What a model's configuration shows to be impossible as asked: told before any weight is read.

Knows configurations and numbers, no files and no device. A model that passes may still turn out not to fit: for most
architectures only the loaded model says what it keeps for a token, and memory is counted again once weights are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

from ringserve.config import ExecutorConfig, ExecutorSettings
from ringserve.engine.kv_layout import LayerKV, bytes_per_page
from ringserve.engine.model_limits import choose_max_model_len, text_config
from ringserve.engine.page_swaps import check_swap_space
from ringserve.engine.serving_plan import ServingPlan

PLAIN_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""``model_type`` of the architectures (``decoder_family``) all of whose layers keep the same, as their configuration
says."""


def known_layers(config: Any) -> list[LayerKV] | None:
    """What each layer keeps for a token; None where the configuration alone does not say."""
    text = text_config(config)
    if getattr(text, "model_type", None) not in PLAIN_TYPES:
        return None
    heads = getattr(text, "num_attention_heads", None)
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    hidden = getattr(text, "hidden_size", None)
    dim = getattr(text, "head_dim", None) or (hidden // heads if heads and hidden else None)
    layers = getattr(text, "num_hidden_layers", None)
    if not (_is_count(layers) and _is_count(kv_heads) and _is_count(dim)):
        return None
    return [LayerKV(kv_heads, dim, dim)] * layers


def check_config(config: Any, settings: ExecutorSettings, plan: ServingPlan, free_bytes: int | None) -> int:
    """``max_model_len``. ``free_bytes`` of the memory that keys and values come from, before the weights take theirs;
    None where that is not known yet.

    Raises:
        ModelError: longer sequences were asked for than the model, or than the memory for keys and values, allows; or
            a swap space that holds no page.
    """
    max_model_len = choose_max_model_len(config, settings.max_model_len)
    layers = known_layers(config)
    if layers is not None:
        check_memory(settings.config, plan, layers, max_model_len, free_bytes)
    return max_model_len


def check_memory(
    config: ExecutorConfig, plan: ServingPlan, layers: Sequence[LayerKV], max_model_len: int, free_bytes: int | None
) -> None:
    """As ``check_config`` does, for layers that are known otherwise."""
    page_bytes = bytes_per_page(layers, plan.page_size, plan.kv_dtype)
    if free_bytes is not None or config.kv_cache_memory is not None:
        plan.budget(page_bytes, max_model_len, config.kv_cache_memory, free_bytes or 0)
    check_swap_space(config.swap_space, page_bytes)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and value > 0
