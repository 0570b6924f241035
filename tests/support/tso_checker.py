"""An explicit-state model checker for small programs on a memory with store buffers.

Each thread has a buffer of stores that the others do not see yet. Loads read the thread's own youngest buffered store,
else memory. A buffered store may reach memory at any time: in program order among stores to the same word, and never
before an older one if it is a release; plain stores to different words may overtake one another. That is x86-TSO where
every store is a release, and weaker where not. Read-modify-writes and system calls on an eventfd act on memory at once,
after the thread's own buffer has been written out; a fence does only the latter.

``explore`` visits every reachable state. Branches are taken together with the instruction before them: they touch no
shared word, so no interleaving is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Registers = dict[str, int]
Value = int | Callable[[Registers], int]


@dataclass(frozen=True)
class Store:
    """A store; ``release``: everything older is visible before it."""

    word: str
    value: Value
    release: bool = False


@dataclass(frozen=True)
class Load:
    word: str
    into: str


@dataclass(frozen=True)
class Fence:
    """A full fence. ``name`` is for taking it away."""

    name: str


@dataclass(frozen=True)
class Exchange:
    """Atomic, sequentially consistent."""

    word: str
    value: int
    into: str


@dataclass(frozen=True)
class Ring:
    """Write an eventfd."""

    word: str


@dataclass(frozen=True)
class Sleep:
    """Block until the eventfd is rung, and read it."""

    word: str


@dataclass(frozen=True)
class Compute:
    """Registers only."""

    into: str
    value: Value


@dataclass(frozen=True)
class Jump:
    """Go to ``label`` if the condition holds."""

    label: str
    condition: Callable[[Registers], bool] | None = None


@dataclass(frozen=True)
class Label:
    name: str


Instruction = Store | Load | Fence | Exchange | Ring | Sleep | Compute | Jump | Label
Program = Sequence[Instruction]

_Thread = tuple[int, tuple[int, ...], tuple[tuple[int, int, bool], ...]]  # position, registers, buffered stores
_State = tuple[tuple[int, ...], tuple[_Thread, ...]]


@dataclass(frozen=True)
class Result:
    """What was found."""

    states: int
    stuck: tuple[str, ...] | None
    """A shortest way into a state in which a thread sleeps for ever; None if there is none."""
    rings: int
    """Most eventfd writes on any way, if they were counted."""


class Model:
    """Threads over shared words, all of which begin as 0."""

    def __init__(
        self, programs: Mapping[str, Program], without: frozenset[str] = frozenset(), count_rings: bool = False
    ) -> None:
        """``without``: names of fences that are taken away. ``count_rings``: tell states apart by how often an eventfd
        was written, which makes more of them."""
        self._ring_step = 1000 if count_rings else 0
        self._names = list(programs)
        self._programs: list[list[Instruction]] = []
        self._labels: list[dict[str, int]] = []
        words: dict[str, int] = {}
        self._registers: list[list[str]] = []
        for program in programs.values():
            kept: list[Instruction] = []
            labels: dict[str, int] = {}
            registers: dict[str, None] = {}
            for step in program:
                if isinstance(step, Label):
                    labels[step.name] = len(kept)
                    continue
                if isinstance(step, Fence) and step.name in without:
                    continue
                if isinstance(step, Store | Load | Exchange | Ring | Sleep):
                    words.setdefault(step.word, len(words))
                if isinstance(step, Load | Exchange | Compute):
                    registers.setdefault(step.into)
                kept.append(step)
            self._programs.append(kept)
            self._labels.append(labels)
            self._registers.append(list(registers))
        self._words = words
        self._word_names = list(words)
        self._rings = sorted({words[step.word] for steps in self._programs for step in steps if isinstance(step, Ring)})

    def explore(self) -> Result:
        """Visit every state, shortest ways first; stop at the first in which somebody sleeps for ever."""
        threads = tuple(
            self._settle(number, (0, (0,) * len(registers), ())) for number, registers in enumerate(self._registers)
        )
        start: _State = ((0,) * len(self._words), threads)
        came_from: dict[_State, tuple[_State, str] | None] = {start: None}
        queue = deque([start])
        stuck: _State | None = None
        while queue and stuck is None:
            state = queue.popleft()
            successors = self._successors(state)
            if not successors and self._unfinished(state):
                stuck = state
            for description, following in successors:
                if following not in came_from:
                    came_from[following] = (state, description)
                    queue.append(following)
        most = max(sum(memory[word] // 1000 for word in self._rings) for memory, _ in came_from)
        return Result(len(came_from), None if stuck is None else self._way(came_from, stuck), most)

    def _unfinished(self, state: _State) -> list[str]:
        return [
            name
            for name, program, (position, _, _) in zip(self._names, self._programs, state[1], strict=True)
            if position < len(program)
        ]

    def _way(self, came_from: Mapping[_State, tuple[_State, str] | None], state: _State) -> tuple[str, ...]:
        steps = [f"sleeps for ever: {', '.join(self._unfinished(state))}"]
        while (before := came_from[state]) is not None:
            state, description = before
            steps.append(description)
        return tuple(reversed(steps))

    def _successors(self, state: _State) -> list[tuple[str, _State]]:
        found: list[tuple[str, _State]] = []
        memory, threads = state
        for number, (position, registers, buffer) in enumerate(threads):
            name = self._names[number]

            def put(text: str, memory: tuple[int, ...], thread: _Thread, number: int = number) -> None:
                changed = (*threads[:number], self._settle(number, thread), *threads[number + 1 :])
                found.append((text, (memory, changed)))

            for index in _visible_next(buffer):
                word, value, _ = buffer[index]
                rest = buffer[:index] + buffer[index + 1 :]
                text = f"{name}: its store {self._word_names[word]} = {value} becomes visible"
                put(text, _with(memory, word, value), (position, registers, rest))
            if position < len(self._programs[number]):
                step = self._programs[number][position]
                outcome = self._execute(step, memory, registers, buffer, number)
                if outcome is not None:
                    text, memory_after, registers_after, buffer_after = outcome
                    put(f"{name}: {text}", memory_after, (position + 1, registers_after, buffer_after))
        return found

    def _execute(
        self, step: Instruction, memory: tuple[int, ...], registers: tuple[int, ...], buffer: Any, number: int
    ) -> tuple[str, tuple[int, ...], tuple[int, ...], Any] | None:
        """What one instruction does; None while it must wait. The word of an eventfd is 1 while it is rung, and counts
        all rings in thousands."""
        names = self._registers[number]
        if isinstance(step, Store):
            value = _evaluate(step.value, names, registers)
            entry = (self._words[step.word], value, step.release)
            return f"stores {step.word} = {value} (in its buffer)", memory, registers, (*buffer, entry)
        if isinstance(step, Load):
            word = self._words[step.word]
            value = next((value for other, value, _ in reversed(buffer) if other == word), memory[word])
            return f"loads {step.word}: {value}", memory, _with(registers, names.index(step.into), value), buffer
        if buffer:  # the rest waits until its own stores are out
            return None
        if isinstance(step, Fence):
            return f"fence {step.name}", memory, registers, buffer
        assert isinstance(step, Exchange | Ring | Sleep)
        word = self._words[step.word]
        if isinstance(step, Exchange):
            after = _with(registers, names.index(step.into), memory[word])
            return (
                f"exchanges {step.word}: {memory[word]} -> {step.value}",
                _with(memory, word, step.value),
                after,
                buffer,
            )
        if isinstance(step, Ring):
            total = memory[word] // 1000 * 1000 + self._ring_step
            return f"rings {step.word}", _with(memory, word, total + 1), registers, buffer
        if memory[word] % 1000 == 0:
            return None
        return f"is woken by {step.word}", _with(memory, word, memory[word] // 1000 * 1000), registers, buffer

    def _settle(self, number: int, thread: _Thread) -> _Thread:
        """Run the instructions that touch no shared word."""
        position, registers, buffer = thread
        program, names, labels = self._programs[number], self._registers[number], self._labels[number]
        while position < len(program):
            step = program[position]
            if isinstance(step, Jump):
                taken = step.condition is None or step.condition(dict(zip(names, registers, strict=True)))
                position = labels[step.label] if taken else position + 1
            elif isinstance(step, Compute):
                registers = _with(registers, names.index(step.into), _evaluate(step.value, names, registers))
                position += 1
            else:
                break
        return position, registers, buffer


def _visible_next(buffer: tuple[tuple[int, int, bool], ...]) -> list[int]:
    """Which buffered stores may reach memory now."""
    found = []
    for index, (word, _, release) in enumerate(buffer):
        if (release and index > 0) or any(older == word for older, _, _ in buffer[:index]):
            continue
        found.append(index)
    return found


def _with(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _evaluate(value: Value, names: Sequence[str], registers: tuple[int, ...]) -> int:
    return value if isinstance(value, int) else value(dict(zip(names, registers, strict=True)))
