"""ringserve: a single-node LLM serving engine.

from ringserve import LLM, SamplingParams
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringserve.offline.llm import LLM as LLM
    from ringserve.offline.sampling_params import SamplingParams as SamplingParams

__version__ = "0.1.0"

_LAZY = {"LLM": "ringserve.offline.llm", "SamplingParams": "ringserve.offline.sampling_params"}
"""Imported when they are asked for: the command and the actors do without."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_LAZY]
