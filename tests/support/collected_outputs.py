"""What a scheduler has told the tokenizer process, read as that would read it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ringserve.messages.columns import unpack_f32, unpack_i32, unpack_u64
from ringserve.messages.token_outputs import SequenceFinish, SequenceStart, TokenOutputs


@dataclass
class Collected:
    """Everything the tokenizer process was told of a choice."""

    tokens: list[int] = field(default_factory=list)
    starts: list[SequenceStart] = field(default_factory=list)
    finishes: list[SequenceFinish] = field(default_factory=list)
    logprobs: list[tuple[int, float, int] | None] = field(default_factory=list)
    """(token id, value, rank) of each token's first candidate."""

    @property
    def end(self) -> tuple[list[int], str, int | None]:
        (finish,) = self.finishes
        return self.tokens, finish.reason, finish.stop_token_id


def collect(message: TokenOutputs, into: dict[tuple[int, int], Collected]) -> None:
    """Add the rows of a message, reading it as its consumer would."""
    counts = unpack_i32(message.token_counts)
    keys = list(zip(unpack_u64(message.request_ids), unpack_i32(message.choices), strict=True))
    assert len(set(keys)) == len(keys) == len(counts)
    tokens = list(unpack_i32(message.token_ids))
    assert len(tokens) == sum(counts)
    entries: list[tuple[int, float, int] | None] = [None] * len(tokens)
    if (columns := message.logprobs) is not None:
        ids, values = unpack_i32(columns.token_ids), unpack_f32(columns.values)
        ranks = iter(unpack_i32(columns.ranks))
        start = 0
        for index, count in enumerate(unpack_i32(columns.counts)):
            if count:
                entries[index] = (ids[start], values[start], next(ranks))
                start += count
        assert start == len(ids) == len(values)
    position = 0
    for key, count in zip(keys, counts, strict=True):
        choice = into.setdefault(key, Collected())
        assert not choice.finishes, f"{key} goes on after its end"
        choice.tokens += tokens[position : position + count]
        choice.logprobs += entries[position : position + count]
        position += count
    for sequence_start in message.starts:
        into[keys[sequence_start.row]].starts.append(sequence_start)
    for finish in message.finishes:
        into[keys[finish.row]].finishes.append(finish)
