"""A choice that goes on where it was: nothing is sent twice and nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizer_calls import feed, generate, ids_of, run_until_quiet
from tokenizer_world import (
    CHAT_TEMPLATE,
    Row,
    World,
    byte_fallback_tokenizer,
    collect,
    make_world,
    ready,
    save_directory,
    settings_for,
)

from ringserve.messages.columns import pack_i32
from ringserve.messages.requests import FinishReason, ResumedChoice

STORY = "naïve 👩‍👩‍👧 text 𒐫 with STO and S in it, then STOP here"


@pytest.mark.parametrize("kind", ["default", "llama", "unigram"])
@pytest.mark.parametrize("include", [False, True])
def test_resumed_anywhere_no_character_is_sent_twice(kind: str, include: bool, tmp_path: Any, world: World) -> None:
    if kind != "default":
        directory = save_directory(byte_fallback_tokenizer(kind), tmp_path, CHAT_TEMPLATE)
        world = make_world(settings_for(directory), ready())
    ids = ids_of(world, STORY)

    def run(k: int, sent: str) -> tuple[list[str], Any]:
        """Deltas after each token from the k-th on, and the final row."""
        resumed = (ResumedChoice(0, pack_i32(ids[:k]), len(sent)),) if k else ()
        run_until_quiet(world, lambda: generate(world, stop=("STOP",), include=include, resumed=resumed))
        deltas = []
        for token in ids[k:]:
            feed(world, Row(1, [token]))
            received = collect(world.frontend.take()).get((1, 0))
            if received is None:
                break
            deltas.append(received.text)
            if received.finishes:
                world.scheduler.clear()
                return deltas, received.finishes[0]
        raise AssertionError("no final row")

    whole, finish = run(0, "")
    cut = "STOP" if include else ""
    assert "".join(whole) == world.actor._encoder.decode(ids, True).split("STOP")[0] + cut
    for k in range(1, len(whole)):
        sent = "".join(whole[:k])
        deltas, resumed_finish = run(k, sent)
        assert sent + "".join(deltas) == "".join(whole)
        assert resumed_finish == finish


def test_a_client_that_has_less_gets_the_rest(world: World) -> None:
    ids = ids_of(world, "Hello wonderful world")
    run_until_quiet(world, lambda: generate(world, resumed=(ResumedChoice(0, pack_i32(ids), 7),)))
    (request,) = world.scheduler.take()
    assert request.resumed[0].finish_reason is None
    feed(world, Row(1, [2], finish="stop"))
    received = collect(world.frontend.take())[1, 0]
    assert received.text == "onderful world"
    assert received.finishes[0].num_output_tokens == len(ids) + 1


def test_resumed_tokens_that_complete_a_stop_end_the_choice(world: World) -> None:
    ids = ids_of(world, "Hello wonderful world")
    resumed = (ResumedChoice(0, pack_i32(ids), 3), ResumedChoice(1, pack_i32(ids[:1]), 5))
    over: FinishReason = "length"
    done = ResumedChoice(2, pack_i32(ids), 9, over)
    run_until_quiet(world, lambda: generate(world, stop=("ful",), n=3, resumed=(*resumed, done)))
    (request,) = world.scheduler.take()
    assert [entry.finish_reason for entry in request.resumed] == ["stop", None, "length"]
    seen = collect(world.frontend.take())
    assert set(seen) == {(1, 0)}
    assert seen[1, 0].text == "lo wonder"
    assert (seen[1, 0].finishes[0].stop_reason, seen[1, 0].finishes[0].num_output_tokens) == ("ful", 2)
    feed(world, Row(1, choice=1, finish="length"), Row(1, choice=2, finish="length"))
    assert set(collect(world.frontend.take())) == {(1, 1)}
    run_until_quiet(world, lambda: generate(world, stop=("ful",), resumed=resumed[:1]))
    assert not world.scheduler
    assert not world.actor._requests
