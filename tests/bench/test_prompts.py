"""Prompts, lengths, conversations and traces: seeded, and of the lengths asked for."""

from __future__ import annotations

import json
import random
import statistics
from itertools import islice
from pathlib import Path

import msgspec
import pytest

import ringserve.bench
from ringserve.bench.bodies import BodyBuilder
from ringserve.bench.lengths import Lengths
from ringserve.bench.prompts import Conversations, DatasetError, Job, RandomPrompts, TokenIds, Turn, Words
from ringserve.bench.traces import MOONCAKE_BLOCK, Trace, read_azure, read_mooncake

SAMPLES = Path(ringserve.bench.__file__).parent / "samples"
IDS = TokenIds(256, 1000)


def draws(text: str, count: int = 5000) -> list[int]:
    rng = random.Random(5)
    return [Lengths.parse(text).draw(rng) for _ in range(count)]


def test_lengths() -> None:
    assert set(draws("128", 10)) == {128}
    uniform = draws("uniform:10:20")
    assert (min(uniform), max(uniform)) == (10, 20)
    normal = draws("normal:100:10")
    assert statistics.fmean(normal) == pytest.approx(100, rel=0.01)
    assert statistics.stdev(normal) == pytest.approx(10, rel=0.05)
    assert statistics.median(draws("lognormal:200:0.5")) == pytest.approx(200, rel=0.03)
    assert min(draws("normal:2:10")) == 1


@pytest.mark.parametrize(
    "text", ["", "x", "0", "-3", "nan", "inf", "uniform:3", "uniform:9:3", "zipf:1:2", "1:2", "normal:5:-1"]
)
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=text or "is not"):
        Lengths.parse(text)


def test_random_ids_are_seeded_and_exact() -> None:
    prompts = RandomPrompts(IDS, Lengths.parse("uniform:5:9"), Lengths.parse("3"))
    jobs = list(islice(prompts.jobs("a"), 20))
    assert jobs == list(islice(prompts.jobs("a"), 20))
    assert jobs != list(islice(prompts.jobs("b"), 20))
    for job in jobs:
        (turn,) = job.turns
        assert isinstance(turn.prompt, list)
        assert 5 <= len(turn.prompt) <= 9
        assert all(256 <= token < 1000 for token in turn.prompt)
        assert turn.output_tokens == 3


def test_shared_prefixes() -> None:
    prompts = RandomPrompts(IDS, Lengths.parse("4"), Lengths.parse("1"), prefix_tokens=6, num_prefixes=3)
    found = [job.turns[0].prompt for job in islice(prompts.jobs("a"), 60)]
    assert {len(prompt) for prompt in found} == {10}
    assert len({tuple(prompt[:6]) for prompt in found}) == 3
    assert len({tuple(prompt[6:]) for prompt in found}) == 60
    again = {tuple(job.turns[0].prompt[:6]) for job in islice(prompts.jobs("another run"), 60)}
    assert again == {tuple(prompt[:6]) for prompt in found}


def test_words_and_turns() -> None:
    prompts = RandomPrompts(Words(), Lengths.parse("7"), Lengths.parse("2"), turns=3)
    job = next(prompts.jobs("a"))
    assert len(job.turns) == 3
    for turn in job.turns:
        assert isinstance(turn.prompt, str)
        assert len(turn.prompt.split()) == 7


def test_conversations() -> None:
    data = Conversations(SAMPLES / "conversations.json", max_turns=2)
    jobs = list(islice(data.jobs("a"), 6))
    assert len(set(jobs)) == 6
    assert sorted(len(job.turns) for job in jobs) == [1, 1, 2, 2, 2, 2]
    assert all(turn.output_tokens > 3 for job in jobs for turn in job.turns)
    fixed = next(Conversations(SAMPLES / "conversations.json", Lengths.parse("5")).jobs("a"))
    assert [turn.output_tokens for turn in fixed.turns] == [5]


def test_conversations_as_messages(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    said = [("system", "Be brief."), ("user", "Hi?"), ("assistant", "Hello there."), ("user", "unanswered")]
    file.write_text(json.dumps([{"messages": [{"role": role, "content": text} for role, text in said]}]))
    assert next(Conversations(file, max_turns=9).jobs("a")) == Job((Turn("Hi?", 3),))


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "not JSON"), ("{}", "no conversation"), ('[{"conversations": [{"from": "gpt", "value": "x"}]}]', "no conv")],
)
def test_files_that_are_no_conversations(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "file.json"
    file.write_text(content)
    with pytest.raises(DatasetError, match=words):
        next(Conversations(file).jobs("a"))
    with pytest.raises(DatasetError, match="No such file"):
        next(Conversations(tmp_path / "absent.json").jobs("a"))


def test_mooncake_sample() -> None:
    arrivals = read_mooncake(SAMPLES / "mooncake.jsonl")
    assert len(arrivals) == 48
    assert arrivals[0].at == 0.0
    assert [a.at for a in arrivals] == sorted(a.at for a in arrivals)
    jobs = list(Trace(SAMPLES / "mooncake.jsonl", "mooncake", IDS, speed=2.0).jobs("a"))
    for arrival, job in zip(arrivals, jobs, strict=True):
        assert job.at == arrival.at / 2
        assert len(job.turns[0].prompt) == arrival.prompt_tokens
        assert job.turns[0].output_tokens == arrival.output_tokens


def test_mooncake_blocks_are_shared_content(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 500, "input_length": 1100, "output_length": 4, "hash_ids": [1, 2, 3]},
        {"timestamp": 2500, "input_length": 1024, "output_length": 4, "hash_ids": [1, 9]},
        {"timestamp": 2500, "input_length": 700, "output_length": 0, "hash_ids": []},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second, third = Trace(file, "mooncake", IDS).jobs("a")
    assert second.at == 2.0
    assert first.turns[0].prompt[:MOONCAKE_BLOCK] == second.turns[0].prompt[:MOONCAKE_BLOCK]
    assert first.turns[0].prompt[MOONCAKE_BLOCK:] != second.turns[0].prompt[MOONCAKE_BLOCK:]
    assert [len(job.turns[0].prompt) for job in (first, second, third)] == [1100, 1024, 700]
    assert third.turns[0].output_tokens == 1
    cut = next(Trace(file, "mooncake", IDS, max_prompt_tokens=600, max_output_tokens=2).jobs("a"))
    assert cut.turns[0].prompt == first.turns[0].prompt[:600]
    assert cut.turns[0].output_tokens == 2


def test_azure_sample() -> None:
    arrivals = read_azure(SAMPLES / "azure.csv")
    assert len(arrivals) == 60
    assert arrivals[0].at == 0.0
    assert 10 < arrivals[-1].at < 120


def test_azure_times(tmp_path: Path) -> None:
    """Seven digits as in the trace of 2023, a zone as in that of 2024, in any order."""
    file = tmp_path / "trace.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:04.5000000,30,3\n2023-11-16 18:17:03.0000000,10,1\n"
        "2023-11-16 18:17:03.250000+00:00,20,2\n"
    )
    found = [(round(a.at, 3), a.prompt_tokens, a.output_tokens) for a in read_azure(file)]
    assert found == [(0.0, 10, 1), (0.25, 20, 2), (1.5, 30, 3)]


def test_traces_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_text('{"timestamp": 1, "input_length": "many", "output_length": 4}\n')
    with pytest.raises(DatasetError, match="line 1"):
        read_mooncake(file)
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2\n")
    with pytest.raises(DatasetError, match="line 2"):
        read_azure(file)
    file.write_text("TIMESTAMP,ContextTokens\n2023-11-16 18:17:04,1\n")
    with pytest.raises(DatasetError, match="line 2"):
        read_azure(file)
    file.write_text("")
    with pytest.raises(DatasetError, match="no requests"):
        read_azure(file)


def test_bodies() -> None:
    job = Job((Turn("Hi", 5), Turn("And?", 6)))
    chat = BodyBuilder("chat", "m", parameters={"temperature": 0.5})
    assert msgspec.json.decode(chat.body(job, 0)) == {
        "model": "m",
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "messages": [{"role": "user", "content": "Hi"}],
    }
    second = msgspec.json.decode(chat.body(job, 1, ["Hello"]))
    assert [message["content"] for message in second["messages"]] == ["Hi", "Hello", "And?"]
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    text = BodyBuilder("completions", "m", ask_usage=False)
    assert msgspec.json.decode(text.body(job, 1, ["Hello"]))["prompt"] == "Hi\nHello\nAnd?"
    assert "stream_options" not in msgspec.json.decode(text.body(job, 0))
    ids = Job((Turn([1, 2], 5),))
    assert msgspec.json.decode(text.body(ids, 0))["prompt"] == [1, 2]
    with pytest.raises(TypeError):
        chat.body(ids, 0)
