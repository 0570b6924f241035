"""The two handshakes of docs/ipc.md, explored in every interleaving and with every delay of stores.

The programs below are the shared accesses of _producer.c, _consumer.c, _doorbell.c and _sleep.c, in their order. With
all fences no reachable state leaves anybody asleep beside a message or beside free space; take one away and the checker
prints how it happens. Run with ``-s`` to read the counterexamples.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tso_checker import (
    Compute,
    Exchange,
    Fence,
    Instruction,
    Jump,
    Label,
    Load,
    Model,
    Program,
    Result,
    Ring,
    Sleep,
    Store,
)

CAPACITY = 2
QUARTER = 1
"""In frames: what must be free before a producer that waits for space is rung."""


def notify(who: str, fence: str, atomic: bool = True) -> list[Instruction]:
    """bell_notify: ring ``who`` if it sleeps. ``fence`` names the fence and the labels."""
    take: list[Instruction] = [Exchange(f"{who}.asleep", 0, "was_asleep")]
    if not atomic:
        take = [Load(f"{who}.asleep", "was_asleep"), Store(f"{who}.asleep", 0)]
    return [
        Fence(fence),
        Load(f"{who}.asleep", "seen"),
        Jump(f"{fence}.awake", lambda r: r["seen"] == 0),
        *take,
        Jump(f"{fence}.awake", lambda r: r["was_asleep"] == 0),
        Ring(f"{who}.eventfd"),
        Label(f"{fence}.awake"),
    ]


def sending(ring: str, messages: int, atomic: bool = True) -> Program:
    """A producer with room: put, flush, and again."""
    steps: list[Instruction] = []
    for number in range(1, messages + 1):
        steps.append(Store(f"{ring}.tail", number, release=True))
        for step in notify("consumer", "producer's", atomic):  # labels of each round are its own
            if isinstance(step, Label):
                step = Label(f"{step.name}{number}")
            elif isinstance(step, Jump):
                step = Jump(f"{step.label}{number}", step.condition)
            steps.append(step)
    return steps


def receiving(rings: Sequence[str], messages: int, on_loop: bool = False) -> Program:
    """A consumer: drain, arm, sleep, until it has everything. ``on_loop``: as uvloop's reader does, which does not
    disarm after a wake-up (the producer's exchange did)."""
    steps: list[Instruction] = [Label("drain")]
    steps += [Load(f"{ring}.tail", f"{ring}_taken") for ring in rings]
    steps += [
        Jump("end", lambda r: all(r[f"{ring}_taken"] == messages for ring in rings)),
        Store("consumer.asleep", 1),
        Fence("consumer's"),
    ]
    for ring in rings:
        steps += [
            Load(f"{ring}.tail", "tail"),
            Jump("not_asleep", lambda r, ring=ring: r["tail"] != r[f"{ring}_taken"]),  # type: ignore[misc]
        ]
    steps += [Sleep("consumer.eventfd")]
    if not on_loop:
        steps += [Store("consumer.asleep", 0)]
    steps += [Jump("drain"), Label("not_asleep"), Store("consumer.asleep", 0), Jump("drain"), Label("end")]
    return steps


def sleep_handshake(producers: int, messages: int, without: str = "", on_loop: bool = False) -> Result:
    rings = [f"ring{number}" for number in range(producers)]
    programs = {f"producer {ring}": sending(ring, messages) for ring in rings}
    programs["consumer"] = receiving(rings, messages, on_loop)
    return Model(programs, frozenset({without})).explore()


@pytest.mark.parametrize("on_loop", [False, True], ids=["blocking", "loop"])
@pytest.mark.parametrize(("producers", "messages"), [(1, 3), (2, 2)])
def test_no_wake_up_is_lost(producers: int, messages: int, on_loop: bool) -> None:
    result = sleep_handshake(producers, messages, on_loop=on_loop)
    assert result.stuck is None
    assert result.states > 100


@pytest.mark.parametrize("producers", [1, 2])
@pytest.mark.parametrize("fence", ["producer's", "consumer's"])
def test_each_fence_of_the_sleep_handshake_is_needed(producers: int, fence: str) -> None:
    result = sleep_handshake(producers, 1, without=fence)
    assert result.stuck is not None
    print(f"\nwithout the {fence} fence:", *result.stuck, sep="\n  ")
    assert "sleeps for ever: consumer" in result.stuck[-1]


def test_two_producers_write_the_eventfd_once() -> None:
    """One sleep, two messages, one system call; a load and a store in place of the exchange would make two."""

    def rings(atomic: bool) -> int:
        sleeper: Program = [
            Store("consumer.asleep", 1),
            Fence("consumer's"),
            Load("a.tail", "a"),
            Jump("end", lambda r: r["a"] == 1),
            Load("b.tail", "b"),
            Jump("end", lambda r: r["b"] == 1),
            Sleep("consumer.eventfd"),
            Label("end"),
        ]
        producers = {name: sending(name, 1, atomic) for name in ("a", "b")}
        return Model({**producers, "consumer": sleeper}, count_rings=True).explore().rings

    assert rings(atomic=True) == 1
    assert rings(atomic=False) == 2


def filling(messages: int) -> Program:
    """A producer that finds the ring full: try_put with make_room, arm, sleep."""
    return [
        Label("next"),
        Jump("end", lambda r: r["tail"] == messages),
        Jump("fits", lambda r: r["tail"] - r["head"] < CAPACITY),
        Load("head", "head"),
        Jump("fits", lambda r: r["tail"] - r["head"] < CAPACITY),
        Store("want_space", 1),
        Fence("make_room's"),
        Load("head", "head"),
        Jump("full", lambda r: r["tail"] - r["head"] >= CAPACITY),
        Store("want_space", 0),
        Label("fits"),
        Compute("tail", lambda r: r["tail"] + 1),
        Store("tail", lambda r: r["tail"], release=True),
        *notify("consumer", "publish's"),
        Jump("next"),
        Label("full"),
        Store("producer.asleep", 1),
        Fence("arm's"),
        Load("want_space", "wanted"),
        Jump("not_asleep", lambda r: r["wanted"] == 0),
        Sleep("producer.eventfd"),
        Label("not_asleep"),
        Store("producer.asleep", 0),
        Jump("next"),
        Label("end"),
    ]


def draining(messages: int) -> Program:
    """A consumer: take one frame at a time, publish the head, ring a producer that waits for space; arm, sleep."""
    return [
        Label("drain"),
        Load("tail", "tail"),
        Jump("empty", lambda r: r["tail"] == r["head"]),
        Label("take"),
        Compute("head", lambda r: r["head"] + 1),
        Store("head", lambda r: r["head"], release=True),
        Fence("publish_head's"),
        Load("want_space", "wanted"),
        Jump("given", lambda r: r["wanted"] == 0),
        Jump("given", lambda r: CAPACITY - (r["tail"] - r["head"]) < QUARTER),
        Exchange("want_space", 0, "wanted"),
        Jump("given", lambda r: r["wanted"] == 0),
        *notify("producer", "giving's"),
        Label("given"),
        Jump("take", lambda r: r["head"] < r["tail"]),
        Jump("drain"),
        Label("empty"),
        Jump("end", lambda r: r["head"] == messages),
        Store("consumer.asleep", 1),
        Fence("consumer's"),
        Load("tail", "tail"),
        Jump("not_asleep", lambda r: r["tail"] != r["head"]),
        Sleep("consumer.eventfd"),
        Label("not_asleep"),
        Store("consumer.asleep", 0),
        Jump("drain"),
        Label("end"),
    ]


def space_handshake(messages: int, without: str = "") -> Result:
    return Model({"producer": filling(messages), "consumer": draining(messages)}, frozenset({without})).explore()


def test_no_producer_sleeps_beside_free_space() -> None:
    result = space_handshake(5)
    assert result.stuck is None
    assert result.states > 1000


@pytest.mark.parametrize("fence", ["publish's", "consumer's", "make_room's", "arm's", "publish_head's"])
def test_each_fence_of_the_space_handshake_is_needed(fence: str) -> None:
    result = space_handshake(5, without=fence)
    assert result.stuck is not None
    print(f"\nwithout {fence} fence:", *result.stuck, sep="\n  ")


def test_the_fence_after_the_exchange_is_there_for_other_callers() -> None:
    """publish_head rings after an exchange, a full fence itself on x86; bell_notify has one for all."""
    assert space_handshake(4, without="giving's").stuck is None


def closing(without: str = "") -> Result:
    """A consumer that closes while the producer waits for space: the producer must learn of it."""
    producer: Program = [
        Store("want_space", 1),
        Fence("make_room's"),
        Load("head", "head"),
        Store("producer.asleep", 1),
        Fence("arm's"),
        Load("want_space", "wanted"),
        Jump("end", lambda r: r["wanted"] == 0),
        Load("closed", "closed"),
        Jump("end", lambda r: r["closed"] == 1),
        Sleep("producer.eventfd"),
        Label("end"),
    ]
    consumer: Program = [
        Store("closed", 1, release=True),
        Fence("close's"),
        Exchange("want_space", 0, "wanted"),
        Jump("end", lambda r: r["wanted"] == 0),
        *notify("producer", "giving's"),
        Label("end"),
    ]
    return Model({"producer": producer, "consumer": consumer}, frozenset({without})).explore()


def test_a_producer_that_waits_learns_of_the_close() -> None:
    assert closing().stuck is None
    assert closing(without="arm's").stuck is not None


def test_the_checker_finds_the_reordering_of_the_litmus_test() -> None:
    """Store buffering: both sides store, then look at the other's word. Both may miss; with fences only one can."""

    def side(mine: str, other: str) -> Program:
        return [
            Store(mine, 1),
            Fence("fence"),
            Load(other, "seen"),
            Jump("end", lambda r: r["seen"] == 1),
            Store(f"{mine}_missed", 1),
            Label("end"),
        ]

    watch: Program = [
        Load("x_missed", "x"),
        Load("y_missed", "y"),
        Jump("end", lambda r: r["x"] + r["y"] < 2),
        Sleep("both_missed"),
        Label("end"),
    ]
    programs = {"x": side("x", "y"), "y": side("y", "x"), "watch": watch}
    assert Model(programs).explore().stuck is None
    assert Model(programs, frozenset({"fence"})).explore().stuck is not None


def test_the_checker_lets_plain_stores_overtake_and_releases_not() -> None:
    """Message passing: the flag before the data only where the flag is no release."""

    def delivered(release: bool) -> Result:
        writer: Program = [Store("data", 1), Store("flag", 1, release=release)]
        reader: Program = [
            Load("flag", "flag"),
            Load("data", "data"),
            Jump("end", lambda r: r["flag"] == 0 or r["data"] == 1),
            Sleep("stale"),
            Label("end"),
        ]
        return Model({"writer": writer, "reader": reader}).explore()

    assert delivered(release=True).stuck is None
    assert delivered(release=False).stuck is not None
