"""What can go wrong with the engine. Mistakes in arguments are ValueError and TypeError.

EngineError
├── EngineStartError    it could not start: one line with the remedy
├── EngineDied          one of its processes ended; all others were ended, too
└── EngineClosed        it was closed before
"""

from __future__ import annotations


class EngineError(RuntimeError):
    """The engine cannot do what it was asked for."""


class EngineStartError(EngineError):
    """The engine could not start."""


class EngineDied(EngineError):
    """One of the engine's processes ended."""


class EngineClosed(EngineError):
    """The engine was closed."""
