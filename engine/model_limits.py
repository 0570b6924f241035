"""What a model's configuration says about serving it: how long sequences may be, what ends them, how to sample.

Knows configurations only, no weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ringserve.engine.model_error import ModelError
from ringserve.messages.sampling import SamplingDefaults

LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")
"""Names under which configurations keep the longest sequence they were made for."""

FALLBACK_MODEL_LEN = 4096
"""For models whose positions are unlimited."""


def text_config(config: Any) -> Any:
    """The part of a configuration that describes the decoder."""
    getter = getattr(config, "get_text_config", None)
    return getter(decoder=True) if getter is not None else config


def own_max_model_len(config: Any) -> tuple[int, str]:
    """The longest sequence that is served right, in tokens, and where the number comes from."""
    text = text_config(config)
    limit, reason = FALLBACK_MODEL_LEN, "the default for models that state no length"
    for key in LENGTH_KEYS:
        value = getattr(text, key, None)
        if isinstance(value, int) and value > 0:
            limit, reason = value, f"the model's {key}"
            break
    for rope in _rope_parameters(text):
        # These two types change the frequencies of the whole row with its longest position: a sequence's result would
        # depend on its batch mates, and its keys in the pages on when they were computed. Up to the original length
        # the frequencies are constant.
        rope_type = str(rope.get("rope_type", "default"))
        if "dynamic" in rope_type or rope_type == "longrope":
            constant = rope.get("original_max_position_embeddings") or getattr(
                text, "original_max_position_embeddings", None
            )
            limit = min(limit, int(constant or limit))
            reason = f"where the rotary embedding of type '{rope_type}' stays constant"
    return limit, reason


def _rope_parameters(text: Any) -> Iterator[Mapping[str, Any]]:
    """Every set of rotary parameters: one for the model, or one for each type of layer."""
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    if not isinstance(rope, Mapping):
        return
    if "rope_type" in rope:
        yield rope
    for nested in rope.values():
        if isinstance(nested, Mapping) and "rope_type" in nested:
            yield nested


def choose_max_model_len(config: Any, asked: int | None) -> int:
    """The user's length, which must be within the model's own, or the model's own."""
    own, reason = own_max_model_len(config)
    if asked is None:
        return own
    if asked > own:
        raise ModelError(
            f"max_model_len {asked} is more than {own} ({reason}); ask for at most {own} with --max-model-len"
        )
    return asked


def eos_ids(*sources: int | Iterable[int] | None) -> tuple[int, ...]:
    """All end-of-sequence ids given, each once, in their order."""
    found: list[int] = []
    for source in sources:
        if isinstance(source, int):
            found.append(source)
        elif source is not None:
            found.extend(int(token) for token in source)
    return tuple(dict.fromkeys(token for token in found if token >= 0))


def sampling_defaults(generation_config: Any) -> SamplingDefaults:
    """Defaults of a ``GenerationConfig``; what it does not set stays neutral. transformers' own default of top_k 50 is
    not a wish of the model, so only what its file states counts (``generation_config`` None: neutral)."""
    if generation_config is None:
        return SamplingDefaults()

    def number(name: str, neutral: float) -> float:
        value = getattr(generation_config, name, None)
        return neutral if value is None else float(value)

    return SamplingDefaults(
        temperature=number("temperature", 1.0),
        top_k=max(0, int(number("top_k", 0))),
        top_p=number("top_p", 1.0),
        min_p=number("min_p", 0.0),
        repetition_penalty=number("repetition_penalty", 1.0),
    )
