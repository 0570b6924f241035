"""Stop strings in a stream of text, found wherever the stream is cut.

Each stop string has a Knuth-Morris-Pratt automaton whose state is the length of its longest prefix that the text so
far ends with. The largest state is exactly what must be held back, and the whole is O(1) amortised per character.

The first stop string to be *completed* wins; of several completed by the same character the longest. So the result
depends on the text alone, not on how tokens cut it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def _failure_function(pattern: str) -> list[int]:
    """Entry ``k``: length of the longest proper prefix of ``pattern[:k]`` that is also its suffix."""
    failure = [0] * (len(pattern) + 1)
    state = 0
    for index in range(1, len(pattern)):
        while state and pattern[index] != pattern[state]:
            state = failure[state]
        if pattern[index] == pattern[state]:
            state += 1
        failure[index + 1] = state
    return failure


class _Automaton:
    """The state of one stop string."""

    __slots__ = ("_failure", "pattern", "state")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.state = 0
        self._failure = _failure_function(pattern)

    def step(self, character: str) -> bool:
        """Advance; True when the pattern is complete."""
        pattern, state = self.pattern, self.state
        if state == len(pattern):
            state = self._failure[state]
        while state and pattern[state] != character:
            state = self._failure[state]
        if pattern[state] == character:
            state += 1
        self.state = state
        return state == len(pattern)

    @property
    def held(self) -> int:
        """Characters at the text's end that may still become this stop string."""
        state = self.state
        return self._failure[state] if state == len(self.pattern) else state


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was completed."""

    stop: str


class StopStrings:
    """Filter between the detokenizer and the client for one choice.

    Args:
        stops: the stop strings; empty ones are ignored.
        include: whether a found stop string is part of the output.
    """

    __slots__ = ("_automata", "_include", "_pending")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._automata = [_Automaton(stop) for stop in stops if stop]
        self._include = include
        self._pending = ""

    @property
    def num_held(self) -> int:
        """Characters taken in and not yet given out."""
        return len(self._pending)

    def feed(self, text: str, armed: bool = True) -> tuple[str, StopMatch | None]:
        """Take in text; give out what no stop string can take back any more.

        Args:
            armed: whether a stop string completed by this text ends the output (False before ``min_tokens``). One
                that begins in unarmed text and is completed by armed text counts.

        Returns:
            The text to send, and the match that ends the output, if any. After a match the rest of ``text`` is
            dropped and the object must not be used again.
        """
        if not self._automata:
            return text, None
        if not text:
            return "", None
        pending = self._pending + text
        start = len(self._pending)
        for index, character in enumerate(text):
            found = ""
            for automaton in self._automata:
                if automaton.step(character) and len(automaton.pattern) > len(found):
                    found = automaton.pattern
            if found and armed:
                self._pending = ""
                end = start + index + 1
                return pending[: end if self._include else end - len(found)], StopMatch(found)
        cut = len(pending) - max(automaton.held for automaton in self._automata)
        self._pending = pending[cut:]
        return pending[:cut], None

    def flush(self) -> str:
        """The text held back; the output ended for another reason."""
        pending, self._pending = self._pending, ""
        return pending
