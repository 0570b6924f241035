"""Log probabilities get their tokens' text."""

from __future__ import annotations

from tokenizer_calls import feed, generate, ids_of
from tokenizer_world import Row, World, collect

from ringserve.messages.columns import pack_f32, pack_i32
from ringserve.messages.logprobs import LogprobColumns, PromptLogprobs
from ringserve.messages.prompts import TokenPrompt


def columns(*entries: list[int]) -> LogprobColumns:
    """One entry for each token: the candidates' ids; the i-th candidate's value is -i - 0.5, ranks are 1, 2, ..."""
    flat = [token for entry in entries for token in entry]
    values = [-index - 0.5 for entry in entries for index in range(len(entry))]
    chosen = [entry for entry in entries if entry]
    return LogprobColumns(
        pack_i32(map(len, entries)), pack_i32(flat), pack_f32(values), pack_i32(range(1, len(chosen) + 1))
    )


def test_logprobs_have_strings_and_exact_bytes(world: World) -> None:
    ids = ids_of(world, "𒐫")
    generate(world, logprobs=1)
    generate(world, request_id=2)
    feed(
        world,
        Row(77, [5]),
        Row(2, [6]),
        Row(1, ids),
        logprobs=columns([5, 9], [], *([token, 2] for token in ids)),
    )
    feed(world, Row(1, [2], finish="stop"), Row(2, finish="abort"), logprobs=columns([2]))
    seen = collect(world.frontend.take())
    assert not seen[2, 0].logprobs
    tokens = seen[1, 0].logprobs
    assert [token.token_id for token in tokens] == [*ids, 2]
    assert b"".join(token.raw for token in tokens[:-1]) == "𒐫".encode()
    assert (tokens[0].token, tokens[0].logprob, tokens[0].rank) == ("�", -0.5, 2)
    assert (tokens[0].top[0].token, tokens[0].top[0].raw, tokens[0].top[0].logprob) == (
        "<|im_end|>",
        b"<|im_end|>",
        -1.5,
    )
    assert (tokens[-1].token, tokens[-1].top) == ("<|im_end|>", ())


def test_logprobs_never_come_before_their_text(world: World) -> None:
    generate(world, logprobs=0, stop=("lo wor",))
    ids = ids_of(world, "Hello we")
    feed(world, Row(1, ids[:1]), logprobs=columns(ids[:1]))
    assert not collect(world.frontend.take())[1, 0].logprobs
    feed(world, Row(1, ids[1:]), logprobs=columns(*([token] for token in ids[1:])))
    assert [token.token_id for token in collect(world.frontend.take())[1, 0].logprobs] == ids
    feed(world, Row(1, finish="abort"))


def test_prompt_logprobs_come_whole_with_the_first_choice(world: World) -> None:
    ids = ids_of(world, "one two three four")
    generate(world, TokenPrompt(pack_i32(ids)), echo=True, prompt_logprobs=1, n=2)
    feed(world, prompt_logprobs=(PromptLogprobs(1, 0, columns([], [ids[1], 7])),))
    feed(
        world,
        Row(1, [5], start=True),
        Row(1, [5], choice=1, start=True),
        prompt_logprobs=(PromptLogprobs(1, 2, columns([ids[2], 7], [ids[3], 7])),),
    )
    feed(world, Row(1, finish="length"), Row(1, choice=1, finish="length"))
    seen = collect(world.frontend.take())
    assert seen[1, 1].starts[0].prompt_logprobs is None
    tokens = seen[1, 0].starts[0].prompt_logprobs
    assert [token.token_id for token in tokens] == ids
    assert [token.logprob for token in tokens] == [None, -0.5, -0.5, -0.5]
    assert "".join(token.token for token in tokens) == "one two three four"
