"""What leaves the scheduler upwards: rows, and how they become a ``TokenOutputs`` message of columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringserve.messages.columns import pack_i32, pack_u64, unpack_i32
from ringserve.messages.logprobs import LogprobColumns, PromptLogprobs
from ringserve.messages.stats import EngineStats, StepTimes
from ringserve.messages.token_outputs import SequenceFinish, SequenceStart, TokenOutputs


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    """One token's entry of ``LogprobColumns``, still packed."""

    count: int
    token_ids: bytes
    values: bytes
    rank: bytes


NO_LOGPROBS = LogprobEntry(0, b"", b"", b"")


def split_logprobs(columns: LogprobColumns) -> list[LogprobEntry]:
    """The entries of ``columns``, one for each token."""
    entries = []
    start = rank = 0
    for count in unpack_i32(columns.counts):
        if count == 0:
            entries.append(NO_LOGPROBS)
            continue
        end = start + 4 * count
        entries.append(
            LogprobEntry(count, columns.token_ids[start:end], columns.values[start:end], columns.ranks[rank : rank + 4])
        )
        start, rank = end, rank + 4
    return entries


def join_logprobs(entries: Sequence[LogprobEntry]) -> LogprobColumns:
    """The reverse of ``split_logprobs``."""
    return LogprobColumns(
        counts=pack_i32(entry.count for entry in entries),
        token_ids=b"".join(entry.token_ids for entry in entries),
        values=b"".join(entry.values for entry in entries),
        ranks=b"".join(entry.rank for entry in entries),
    )


@dataclass(slots=True)
class OutputRow:
    """What happened to one choice since the last time: at most one row for each in a batch."""

    request_id: int
    choice: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[LogprobEntry, ...] = ()
    """One for each token, or none at all."""
    start: SequenceStart | None = None
    """Its ``row`` is set when the row is packed; so is the finish's."""
    finish: SequenceFinish | None = None


@dataclass(slots=True)
class OutputBatch:
    """Everything there is to hand on."""

    rows: list[OutputRow]
    prompt_logprobs: list[PromptLogprobs]

    def __bool__(self) -> bool:
        return bool(self.rows or self.prompt_logprobs)


def pack_token_outputs(batch: OutputBatch, times: StepTimes | None, stats: EngineStats, now_ns: int) -> TokenOutputs:
    """Turn rows into columns."""
    starts = []
    finishes = []
    token_ids: list[int] = []
    for index, row in enumerate(batch.rows):
        token_ids.extend(row.token_ids)
        if (start := row.start) is not None:
            starts.append(
                SequenceStart(
                    index, start.queued_ns, start.first_scheduled_ns, start.num_cached_tokens, start.num_preemptions
                )
            )
        if (finish := row.finish) is not None:
            finishes.append(
                SequenceFinish(index, finish.reason, finish.stop_token_id, finish.num_preemptions, finish.message)
            )
    logprobs = None
    if any(row.logprobs for row in batch.rows):
        logprobs = join_logprobs(
            [entry for row in batch.rows for entry in (row.logprobs or (NO_LOGPROBS,) * len(row.token_ids))]
        )
    return TokenOutputs(
        request_ids=pack_u64(row.request_id for row in batch.rows),
        choices=pack_i32(row.choice for row in batch.rows),
        token_counts=pack_i32(len(row.token_ids) for row in batch.rows),
        token_ids=pack_i32(token_ids),
        starts=tuple(starts),
        finishes=tuple(finishes),
        logprobs=logprobs,
        prompt_logprobs=tuple(batch.prompt_logprobs),
        times=times,
        stats=stats,
        sent_ns=now_ns,
    )
