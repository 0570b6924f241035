"""One step's tokens to one step's text: ``TokenOutputs`` into a ``TextBatch`` for each frontend."""

from __future__ import annotations

from ringserve.engine.choice_output import ChoiceOutput
from ringserve.engine.text_batch import TextBatch
from ringserve.engine.token_logprobs import LogprobReader, without_logprob
from ringserve.engine.token_text import TokenText
from ringserve.engine.tokenizer_request import AdmittedRequest, RequestState
from ringserve.messages.columns import unpack_i32, unpack_u64
from ringserve.messages.logprobs import PromptLogprobs, TokenLogprob
from ringserve.messages.requests import Abort, OutputParams
from ringserve.messages.text_outputs import TextFinish, TextStart
from ringserve.messages.token_outputs import SequenceFinish, SequenceStart, TokenOutputs


class TokenOutputsReader:
    """Moves the open choices forward and closes them.

    Args:
        requests: the open requests by id; those whose last choice ends are removed.
    """

    def __init__(self, tokens: TokenText, requests: dict[int, RequestState]) -> None:
        self._tokens = tokens
        self._requests = requests
        self.eos_ids: frozenset[int] = frozenset()

    def read(self, message: TokenOutputs) -> tuple[dict[str, TextBatch], list[Abort]]:
        """The rows for each frontend by its role, and an Abort for each choice that a stop string ended."""
        for chunk in message.prompt_logprobs:
            self._keep_prompt_logprobs(chunk)
        starts = {start.row: start for start in message.starts}
        finishes = {finish.row: finish for finish in message.finishes}
        token_ids = unpack_i32(message.token_ids).tolist()
        reader = LogprobReader(message.logprobs, self._tokens) if message.logprobs is not None else None
        batches: dict[str, TextBatch] = {}
        aborts: list[Abort] = []
        begin = 0
        columns = zip(
            unpack_u64(message.request_ids),
            unpack_i32(message.choices),
            unpack_i32(message.token_counts),
            strict=True,
        )
        for row, (request_id, choice, count) in enumerate(columns):
            ids = token_ids[begin : begin + count]
            begin += count
            state = self._requests.get(request_id)
            output = state.admitted.choices.get(choice) if state is not None and state.admitted is not None else None
            if state is None or state.admitted is None or output is None:
                if reader is not None:
                    reader.skip(count)
                continue
            batch = batches.get(state.source)
            if batch is None:
                batch = batches[state.source] = TextBatch()
            start = None
            if row in starts and not output.started:
                output.started = True
                start = self._start(batch.next_row, choice, starts[row], state, state.admitted)
            finish = finishes.get(row)
            hide_last = self._hides_last(ids, finish, state.admitted.output)
            if self._advance(batch, request_id, choice, output, ids, reader, start, finish, hide_last):
                del state.admitted.choices[choice]
                if not state.admitted.choices:
                    del self._requests[request_id]
                if finish is None:
                    aborts.append(Abort(request_id, choice, "stop"))
        return batches, aborts

    def _advance(
        self,
        batch: TextBatch,
        request_id: int,
        choice: int,
        output: ChoiceOutput,
        ids: list[int],
        reader: LogprobReader | None,
        start: TextStart | None,
        finish: SequenceFinish | None,
        hide_last: bool,
    ) -> bool:
        """Feed a row's tokens and append the row; True if the choice is over."""
        used = 0
        for index, token_id in enumerate(ids):
            logprob = reader.take() if reader is not None else None
            output.feed(token_id, logprob, visible=not (hide_last and index == len(ids) - 1))
            used += 1
            if output.stop is not None:
                break
        if reader is not None:
            reader.skip(len(ids) - used)
        if finish is not None and output.stop is None:
            output.finish()
        final = _final(batch.next_row, output, finish)
        batch.add(
            request_id,
            choice,
            output.take_text(),
            ids[:used],
            output.take_logprobs(final is not None),
            start,
            final,
        )
        return final is not None

    def _hides_last(self, ids: list[int], finish: SequenceFinish | None, params: OutputParams) -> bool:
        """Whether the row's last token ended the choice and its text is not part of the output."""
        if finish is None or finish.reason != "stop" or not ids:
            return False
        if finish.stop_token_id is not None:
            return not params.include_stop_str_in_output
        return params.skip_special_tokens and ids[-1] in self.eos_ids

    def _start(
        self, row: int, choice: int, start: SequenceStart, state: RequestState, admitted: AdmittedRequest
    ) -> TextStart:
        echo = admitted.output.echo
        return TextStart(
            row=row,
            num_prompt_tokens=admitted.prompt.num_tokens,
            num_cached_tokens=start.num_cached_tokens,
            received_ns=admitted.received_ns,
            tokenized_ns=state.tokenized_ns,
            queued_ns=start.queued_ns,
            first_scheduled_ns=start.first_scheduled_ns,
            max_tokens=admitted.max_tokens,
            max_tokens_clamped=admitted.max_tokens_clamped,
            prompt_token_ids=admitted.prompt.token_ids if echo else b"",
            prompt_text=admitted.prompt.text if echo else None,
            prompt_logprobs=(tuple(state.prompt_logprobs) if admitted.wants_prompt_logprobs and choice == 0 else None),
        )

    def _keep_prompt_logprobs(self, chunk: PromptLogprobs) -> None:
        """Convert a chunk as it comes: a whole prompt at once would hold up everybody's tokens."""
        state = self._requests.get(chunk.request_id)
        if state is None or state.admitted is None:
            return
        prompt_ids = unpack_i32(state.admitted.prompt.token_ids)
        reader = LogprobReader(chunk.columns, self._tokens)
        for position in range(chunk.start, chunk.start + len(reader)):
            taken: TokenLogprob | None = reader.take()
            state.prompt_logprobs.append(taken or without_logprob(prompt_ids[position], self._tokens))


def _final(row: int, output: ChoiceOutput, finish: SequenceFinish | None) -> TextFinish | None:
    """The choice's end: a stop string found in its text comes before what the scheduler says of the same tokens."""
    num_preemptions = finish.num_preemptions if finish is not None else 0
    if output.stop is not None:
        return TextFinish(row, "stop", output.stop, output.num_tokens, num_preemptions)
    if finish is None:
        return None
    return TextFinish(row, finish.reason, finish.stop_token_id, output.num_tokens, num_preemptions, finish.message)
