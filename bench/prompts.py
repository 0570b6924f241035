"""What requests ask for: jobs of one or more turns, from random tokens or a file of conversations.

Everything is drawn from a seed, so that two servers, or two runs, get the same requests.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ringserve.bench.lengths import Lengths

Prompt = str | list[int]
"""Text, or token ids."""


class DatasetError(Exception):
    """A file that is not what was asked for; the message is for the user."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: what the user says, and how long the answer may be."""

    prompt: Prompt
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Job:
    """A conversation of one or more turns; each turn is one request."""

    turns: tuple[Turn, ...]
    at: float | None = None
    """Seconds after the start at which a trace wants it sent."""


class Units(Protocol):
    """Something to make prompts of a length from."""

    def draw(self, rng: random.Random, count: int) -> list[int]:
        """Random units, about a token each."""
        ...

    def prompt(self, units: Sequence[int]) -> Prompt:
        """The prompt made of them."""
        ...


@dataclass(frozen=True)
class TokenIds:
    """Token ids of ``[low, high)``: exactly one token each."""

    low: int
    high: int

    def draw(self, rng: random.Random, count: int) -> list[int]:
        """Random ids."""
        return rng.choices(range(self.low, self.high), k=count)

    def prompt(self, units: Sequence[int]) -> Prompt:
        """The ids themselves."""
        return list(units)


class Words:
    """Common English words: about one token each with the vocabularies in use; the server's usage tells exactly."""

    def draw(self, rng: random.Random, count: int) -> list[int]:
        """Random words, by their place in the list."""
        return rng.choices(range(len(_WORDS)), k=count)

    def prompt(self, units: Sequence[int]) -> Prompt:
        """The words with spaces between."""
        return " ".join(_WORDS[unit] for unit in units)


@dataclass(frozen=True)
class RandomPrompts:
    """Random jobs, optionally sharing prefixes, without end."""

    units: Units
    prompt_tokens: Lengths
    """Of each turn, without the shared prefix."""
    output_tokens: Lengths
    prefix_tokens: int = 0
    num_prefixes: int = 1
    turns: int = 1

    def jobs(self, seed: str) -> Iterator[Job]:
        """The same seed gives the same jobs. Prefixes are the same for all seeds: they stand for system prompts."""
        prefixes = [
            self.units.draw(random.Random(f"prefix {index}"), self.prefix_tokens) for index in range(self.num_prefixes)
        ]
        rng = random.Random(seed)
        while True:
            turns = []
            for index in range(self.turns):
                prefix = prefixes[rng.randrange(self.num_prefixes)] if index == 0 else []
                body = self.units.draw(rng, self.prompt_tokens.draw(rng))
                turns.append(Turn(self.units.prompt([*prefix, *body]), self.output_tokens.draw(rng)))
            yield Job(tuple(turns))


@dataclass(frozen=True)
class Conversations:
    """A ShareGPT-like file: a JSON list of ``{"conversations": [{"from": "human" | "gpt", "value": TEXT}, ...]}``.

    An answer's length is estimated at four characters a token, unless a length is given.
    """

    path: Path
    output_tokens: Lengths | None = None
    max_turns: int = 1

    def jobs(self, seed: str) -> Iterator[Job]:
        """The conversations in a seeded order, again and again.

        Raises:
            DatasetError: unreadable, or nothing usable in it.
        """
        found = self._read()
        rng = random.Random(seed)
        while True:
            rng.shuffle(found)
            for pairs in found:
                yield Job(
                    tuple(
                        Turn(question, self.output_tokens.draw(rng) if self.output_tokens else estimate_tokens(answer))
                        for question, answer in pairs[: self.max_turns]
                    )
                )

    def _read(self) -> list[list[tuple[str, str]]]:
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except OSError as error:
            raise DatasetError(f"{self.path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise DatasetError(f"{self.path}: not JSON: {error}") from error
        found = []
        for entry in content if isinstance(content, list) else []:
            messages = entry.get("conversations") or entry.get("messages") if isinstance(entry, dict) else None
            if isinstance(messages, list) and (pairs := _pairs(messages)):
                found.append(pairs)
        if not found:
            raise DatasetError(f"{self.path}: no conversation in it (a list of {{'conversations': [...]}} is expected)")
        return found


def _pairs(messages: Sequence[object]) -> list[tuple[str, str]]:
    """(question, answer) turns; stops where they no longer alternate."""
    said = []
    for message in messages:
        if not isinstance(message, dict):
            break
        role = message.get("from") or message.get("role")
        text = message.get("value") or message.get("content")
        if role != "system":
            said.append((role in ("human", "user"), _sendable(text) if isinstance(text, str) else ""))
    pairs = []
    for (asks, question), (asks_too, answer) in zip(said[::2], said[1::2], strict=False):
        if not asks or asks_too or not question or not answer:
            break
        pairs.append((question, answer))
    return pairs


def _sendable(text: str) -> str:
    """Halves of surrogate pairs, which JSON files may hold and UTF-8 cannot, become question marks."""
    return text.encode(errors="replace").decode()


def estimate_tokens(text: str) -> int:
    """Tokens in a text, without a tokenizer: a quarter of its characters."""
    return max(1, round(len(text) / 4))


_WORDS = (  # noqa: SIM905 (a list of literals would be unreadable)
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face others level office door health person art war history party result change morning reason "
    "research girl guy moment air teacher force education foot boy age policy music market sense nation plan college "
    "interest death experience effect use class control field development role effort rate heart drug show leader "
    "light voice wife police mind price report decision son view relationship town road arm difference value building "
    "action season society tax director position player record paper space ground form event official matter center "
    "couple site project activity star table need court oil situation cost industry figure street image phone data "
    "picture practice piece land product doctor wall patient worker news test movie north love step support letter"
).split()
