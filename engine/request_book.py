"""The requests that are being served, from their entry to their end.

A sequence ends when its last token is an end, when it is as long as it may get, when it is aborted, or when the
executor failed on it; whatever the reason, it gives back what it holds here, and its last row says why.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress

from ringserve.engine.output_collector import OutputCollector
from ringserve.engine.policy import Policy
from ringserve.engine.residents import Residents
from ringserve.engine.scheduler_outputs import NO_LOGPROBS, LogprobEntry, OutputRow, split_logprobs
from ringserve.engine.scheduler_step import StepRecord
from ringserve.engine.sequence import Request, Sequence, SequenceStatus
from ringserve.engine.wait_prediction import WaitPredictor
from ringserve.messages.columns import unpack_i32
from ringserve.messages.requests import FinishReason
from ringserve.messages.steps import ModelRunnerOutput
from ringserve.messages.token_outputs import SequenceFinish

_FINISHED = SequenceStatus.FINISHED


class RequestBook:
    """Live requests, and the rows that come of them."""

    def __init__(
        self, residents: Residents, policy: Policy, predictor: WaitPredictor, eos_token_ids: frozenset[int]
    ) -> None:
        self._residents = residents
        self._waiting = policy
        self._predictor = predictor
        self._eos_token_ids = eos_token_ids
        self.requests: dict[int, Request] = {}
        self.outputs = OutputCollector()

    def enter(self, request: Request, sequences: Iterable[Sequence]) -> None:
        """The request's choices that are not over wait for their turn; one that enters at its end is finished."""
        for sequence in sequences:
            request.live[sequence.choice] = sequence
            self._waiting.add(sequence)
        if request.live:
            self.requests[request.request_id] = request
        for sequence in list(request.live.values()):
            if sequence.output_token_ids:
                self._finish_if_over(sequence, (), ())

    def drop(self, request: Request) -> None:
        """A request of which nothing has begun is refused: it leaves no rows."""
        for sequence in list(request.live.values()):
            self._waiting.remove(sequence)
            self._end(sequence)

    def take_tokens(self, record: StepRecord, output: ModelRunnerOutput) -> None:
        """Hand each sequence what the step drew for it, and end those that are over."""
        tokens = dict(zip(unpack_i32(output.slots), unpack_i32(output.token_ids), strict=True))
        logprobs: dict[int, LogprobEntry] = {}
        if output.logprobs is not None:
            logprobs = dict(zip(tokens, split_logprobs(output.logprobs), strict=True))
        failures = dict(output.failed_slots)
        served = []
        rows = self.outputs.rows
        for sequence, slot in compress(zip(record.sequences, record.slots, strict=True), record.samples):
            sequence.num_pending_tokens -= 1
            token = tokens.get(slot)
            if sequence.status is _FINISHED or token is None or sequence.max_output_tokens == 0:
                sequence.num_known_tokens -= 1
                if sequence.status is not _FINISHED:
                    self._finish_without_token(sequence, failures.get(slot))
                continue
            generated = sequence.output_token_ids
            generated.append(token)  # it was known already, though not by its value
            served.append(sequence)
            entry = logprobs.get(slot, NO_LOGPROBS) if logprobs else NO_LOGPROBS
            columns = (entry,) if entry.count else ()
            request = sequence.request
            if len(generated) >= sequence.max_output_tokens or token in request.end_token_ids or not sequence.started:
                self._finish_if_over(sequence, (token,), columns)
            else:
                rows.append(OutputRow(request.request_id, sequence.choice, (token,), columns))
        self._waiting.charge_outputs(served)

    def _finish_without_token(self, sequence: Sequence, failure: str | None) -> None:
        """A step that should have drawn a token for it did not."""
        if failure is None and sequence.max_output_tokens == 0:
            self.finish(sequence, (), (), "length")
        else:
            message = failure if failure is not None else "The executor returned no token for this sequence."
            self.finish(sequence, (), (), "error", message=message)

    def _finish_if_over(
        self, sequence: Sequence, token_ids: tuple[int, ...], logprobs: tuple[LogprobEntry, ...]
    ) -> None:
        """End the sequence if its last token is the end; else hand on the tokens, which are its last ones."""
        request = sequence.request
        num_output_tokens = len(sequence.output_token_ids)
        last = sequence.output_token_ids[-1]
        # The executor masks these before min_tokens; they must not end it here either.
        if last in request.end_token_ids and num_output_tokens > request.sampling.min_tokens:
            is_eos = last in self._eos_token_ids and not request.sampling.ignore_eos
            self.finish(sequence, token_ids, logprobs, "stop", stop_token_id=None if is_eos else last)
        elif num_output_tokens >= sequence.max_output_tokens:
            self.finish(sequence, token_ids, logprobs, "length")
        elif token_ids:
            self.outputs.add(sequence, token_ids, logprobs, None)

    def finish(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        logprobs: tuple[LogprobEntry, ...],
        reason: FinishReason,
        stop_token_id: int | None = None,
        message: str = "",
    ) -> None:
        """End a sequence, wherever it is, with its last tokens."""
        if sequence.status is SequenceStatus.RUNNING:
            if reason != "error":
                self._residents.prefixes.end_of_turn(sequence)
            self._residents.leave(sequence)
        else:
            self._waiting.remove(sequence)
        if reason in ("stop", "length"):
            self._predictor.on_finish(len(sequence.output_token_ids))
        self._end(sequence)
        finish = SequenceFinish(-1, reason, stop_token_id, sequence.num_preemptions, message)
        self.outputs.add(sequence, token_ids, logprobs, finish)

    def _end(self, sequence: Sequence) -> None:
        """It holds nothing and waits no more: forget it, and its request with the last choice."""
        self._residents.swaps.forget(sequence)
        sequence.status = SequenceStatus.FINISHED
        request = sequence.request
        del request.live[sequence.choice]
        if not request.live:
            del self.requests[request.request_id]
