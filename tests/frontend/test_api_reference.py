"""docs/api.md names every field and metric that there is."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ringserve.frontend.metrics import Metrics
from ringserve.frontend.parameters import HARMLESS
from ringserve.frontend.protocol import (
    ChatCompletionBody,
    CompletionBody,
    DetokenizeBody,
    StreamOptions,
    TokenizeBody,
)

REFERENCE = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("body", [ChatCompletionBody, CompletionBody, TokenizeBody, DetokenizeBody, StreamOptions])
def test_every_field_is_named(body: type) -> None:
    names = [field.name for field in msgspec.structs.fields(body)]
    assert [name for name in names if f"`{name}`" not in REFERENCE] == []


def test_every_harmless_parameter_is_named() -> None:
    assert [name for name in sorted(HARMLESS) if f"`{name}`" not in REFERENCE] == []


def test_every_metric_is_named() -> None:
    exposition = Metrics("model", "0").render().decode()
    names = [family.name for family in text_string_to_metric_families(exposition) if family.type != "unknown"]
    assert len(names) > 20
    names = [name for name in names if not name.endswith("_created")]
    assert [name for name in names if f"`{name}`" not in REFERENCE] == []
