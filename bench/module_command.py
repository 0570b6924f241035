"""What benchmarks share that are run as modules (``python -P -m ringserve.bench.NAME``): mistakes are one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import NoReturn

from ringserve.model_source import ModelNotFound
from ringserve.options import OneLineParser, OptionError


def module_parser(file: str, description: str | None) -> OneLineParser:
    """The parser of the module in ``file``, whose text is its help."""
    return OneLineParser(
        prog=f"python -P -m ringserve.bench.{Path(file).stem}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def at_least_one(text: str) -> int:
    """An integer of at least 1. Raises ArgumentTypeError."""
    return _at_least(1, text)


def at_least_zero(text: str) -> int:
    """An integer of at least 0. Raises ArgumentTypeError."""
    return _at_least(0, text)


def positive(text: str) -> float:
    """A finite number above 0. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not (isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def run_module(main: Callable[[], int]) -> NoReturn:
    """Exit as ``main`` says; 2 where options do not go together, 1 where a model's files cannot be had."""
    try:
        status = main()
    except OptionError as error:
        print(f"ringserve: error: {error}", file=sys.stderr)
        status = 2
    except ModelNotFound as error:
        print(f"ringserve: error: {error}", file=sys.stderr)
        status = 1
    sys.exit(status)


def _at_least(least: int, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} is below {least}")
    return value
