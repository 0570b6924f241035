"""What configurations say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ringserve.engine.model_error import ModelError, first_line
from ringserve.engine.model_limits import (
    FALLBACK_MODEL_LEN,
    choose_max_model_len,
    eos_ids,
    own_max_model_len,
    sampling_defaults,
)
from ringserve.messages.sampling import SamplingDefaults


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": None, "seq_length": 512}, 512),
        ({}, FALLBACK_MODEL_LEN),
        (
            {
                "max_position_embeddings": 99,
                "rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 9},
            },
            99,
        ),
        ({"max_position_embeddings": 99, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, 99),
        (
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 4096},
            },
            4096,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 8192,
                "rope_parameters": {"rope_type": "longrope"},
            },
            8192,
        ),
        (
            {
                "max_position_embeddings": 1000,
                "rope_parameters": {
                    "full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 100},
                    "sliding_attention": {"rope_type": "default"},
                },
            },
            100,
        ),
    ],
)
def test_longest_sequence(fields: dict[str, Any], expected: int) -> None:
    config = SimpleNamespace(**fields)
    assert own_max_model_len(config)[0] == expected
    assert choose_max_model_len(config, None) == expected
    assert choose_max_model_len(config, expected - 1) == expected - 1
    with pytest.raises(ModelError, match=f"at most {expected} with --max-model-len"):
        choose_max_model_len(config, expected + 1)


def test_text_part_of_a_composite_configuration() -> None:
    text = SimpleNamespace(max_position_embeddings=77)
    assert own_max_model_len(SimpleNamespace(get_text_config=lambda decoder: text))[0] == 77


def test_eos_ids() -> None:
    assert eos_ids(None, 3, [4, 3], (5,)) == (3, 4, 5)
    assert eos_ids(None, -1) == ()


def test_sampling_defaults() -> None:
    assert sampling_defaults(None) == SamplingDefaults()
    stated = SimpleNamespace(temperature=0.0, top_k=None, top_p=0.5, min_p=None, repetition_penalty=1.1)
    assert sampling_defaults(stated) == SamplingDefaults(temperature=0.0, top_p=0.5, repetition_penalty=1.1)


def test_first_line() -> None:
    assert first_line(ValueError("a\nb")) == "a"
    assert first_line(KeyError()) == "KeyError"
