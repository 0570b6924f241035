"""Recorded traffic, replayed: when requests came and how long they were. The text itself is not in such traces."""

from __future__ import annotations

import csv
import datetime
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from ringserve.bench.lengths import LONGEST
from ringserve.bench.prompts import DatasetError, Job, Turn, Units

MOONCAKE_BLOCK = 512
"""Tokens that one of the Mooncake trace's hash ids stands for."""


@dataclass(frozen=True)
class Arrival:
    """One line of a trace."""

    at: float
    """Seconds after the first."""
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = field(default=())
    """What the prompt's blocks contain: the same id is the same content, so that prefixes are shared as they were."""


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    """Milliseconds."""
    input_length: Annotated[int, msgspec.Meta(ge=0, le=LONGEST)]
    output_length: Annotated[int, msgspec.Meta(ge=0, le=LONGEST)]
    hash_ids: tuple[int, ...] = ()


def read_mooncake(path: Path) -> list[Arrival]:
    """JSON lines of ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids``.

    Source: the Mooncake project's published traces (FAST 25).

    Raises:
        DatasetError: unreadable, or a line of another form.
    """
    found = []
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            entry = msgspec.json.decode(line, type=_MooncakeLine)
        except msgspec.DecodeError as error:
            raise DatasetError(f"{path}, line {number}: not a line of a Mooncake trace: {error}") from None
        found.append(Arrival(entry.timestamp / 1e3, entry.input_length, entry.output_length, entry.hash_ids))
    return _from_first(path, found)


def read_azure(path: Path) -> list[Arrival]:
    """CSV with the columns ``TIMESTAMP``, ``ContextTokens``, ``GeneratedTokens``.

    Source: the Azure public dataset's LLM inference traces (2023 and 2024).

    Raises:
        DatasetError: unreadable, or a row of another form.
    """
    found = []
    for number, row in _rows(path):
        try:
            moment = datetime.datetime.fromisoformat(row["TIMESTAMP"].strip())
            lengths = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            if not (0 <= lengths[0] <= LONGEST and 0 <= lengths[1] <= LONGEST):
                raise ValueError("no lengths of a request")
        except (KeyError, ValueError, AttributeError, TypeError):
            raise DatasetError(f"{path}, line {number}: not a row of TIMESTAMP,ContextTokens,GeneratedTokens") from None
        found.append(Arrival(moment.replace(tzinfo=moment.tzinfo or datetime.UTC).timestamp(), *lengths))
    return _from_first(path, found)


@dataclass(frozen=True)
class Trace:
    """A trace as jobs; requests longer than the limits are cut to them."""

    path: Path
    form: Literal["mooncake", "azure"]
    units: Units
    speed: float = 1.0
    """2: twice as fast as recorded."""
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None

    def jobs(self, seed: str) -> Iterator[Job]:
        """In the order of their times, once.

        Raises:
            DatasetError: see ``read_mooncake`` and ``read_azure``.
        """
        for index, arrival in enumerate(self.arrivals()):
            length = max(1, min(arrival.prompt_tokens, self.max_prompt_tokens or arrival.prompt_tokens))
            units: list[int] = []
            for block in arrival.blocks:
                if len(units) >= length:
                    break
                units += self.units.draw(random.Random(f"{seed} block {block}"), MOONCAKE_BLOCK)
            if len(units) < length:
                units += self.units.draw(random.Random(f"{seed} request {index}"), length - len(units))
            output = min(arrival.output_tokens, self.max_output_tokens or arrival.output_tokens)
            turn = Turn(self.units.prompt(units[:length]), max(1, output))
            yield Job((turn,), at=arrival.at / self.speed)

    def arrivals(self) -> list[Arrival]:
        """The trace's lines."""
        return read_mooncake(self.path) if self.form == "mooncake" else read_azure(self.path)


def _rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """(line number, row)"""
    reader = csv.DictReader(_lines(path))
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise DatasetError(f"{path}, line {reader.reader.line_num}: not CSV: {error}") from None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise DatasetError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path}: not text: {error}") from error


def _from_first(path: Path, arrivals: list[Arrival]) -> list[Arrival]:
    if not arrivals:
        raise DatasetError(f"{path}: no requests in it")
    arrivals.sort(key=lambda arrival: arrival.at)
    start = arrivals[0].at
    return [Arrival(a.at - start, a.prompt_tokens, a.output_tokens, a.blocks) for a in arrivals]
