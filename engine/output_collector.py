"""Rows on their way up: what became of each sequence since the scheduler was asked last."""

from __future__ import annotations

from ringserve.engine.scheduler_outputs import LogprobEntry, OutputBatch, OutputRow, join_logprobs, split_logprobs
from ringserve.engine.sequence import Sequence, SequenceStatus
from ringserve.messages.logprobs import LogprobColumns, PromptLogprobs
from ringserve.messages.token_outputs import SequenceFinish, SequenceStart


class OutputCollector:
    """Keeps rows in order; a sequence's first row says how it started."""

    def __init__(self) -> None:
        self._batch = OutputBatch([], [])

    def take(self) -> OutputBatch:
        """Everything since the last call."""
        batch, self._batch = self._batch, OutputBatch([], [])
        return batch

    @property
    def rows(self) -> list[OutputRow]:
        """What is being collected: for whoever adds many rows of sequences that have started, and do not end."""
        return self._batch.rows

    def add(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        logprobs: tuple[LogprobEntry, ...],
        finish: SequenceFinish | None,
    ) -> None:
        request = sequence.request
        if sequence.started:
            self._batch.rows.append(OutputRow(request.request_id, sequence.choice, token_ids, logprobs, None, finish))
        else:
            sequence.started = True
            # One that ended before it was ever scheduled has waited for nothing.
            first_scheduled_ns = sequence.first_scheduled_ns or request.queued_ns
            start = SequenceStart(
                -1, request.queued_ns, first_scheduled_ns, sequence.num_cached_tokens, sequence.num_preemptions
            )
            self._batch.rows.append(OutputRow(request.request_id, sequence.choice, token_ids, logprobs, start, finish))

    def add_prompt_logprobs(self, sequence: Sequence, start: int, columns: LogprobColumns) -> None:
        """Each position once, in ascending order; a recomputed prompt repeats itself."""
        if sequence.status is SequenceStatus.FINISHED or sequence.choice != 0:
            return
        num_known = sequence.next_prompt_logprob - start
        end = start + len(columns.counts) // 4
        if end <= sequence.next_prompt_logprob:
            return
        if num_known > 0:
            columns = join_logprobs(split_logprobs(columns)[num_known:])
            start = sequence.next_prompt_logprob
        sequence.next_prompt_logprob = end
        self._batch.prompt_logprobs.append(PromptLogprobs(sequence.request.request_id, start, columns))
