"""A batch on its way through the engine: fed as there is room, collected in the order of the prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ringserve.messages.columns import unpack_i32, unpack_u64
from ringserve.messages.logprobs import TokenLogprob
from ringserve.messages.prompts import TokenPrompt
from ringserve.messages.requests import GenerateRequest, RequestRefused
from ringserve.messages.rings import FrontendInbound, FrontendMessage
from ringserve.messages.text_outputs import TextFinish, TextOutputs, TextStart
from ringserve.offline.encoding import EncodedPrompt
from ringserve.offline.errors import EngineError
from ringserve.offline.outputs import CompletionOutput, Logprob, LogprobsOfPosition, RequestMetrics, RequestOutput
from ringserve.offline.sampling_params import EngineParams

MAX_WAITING = 256
"""Choices in the scheduler's queue, beyond those that can run."""


@dataclass(slots=True)
class _Choice:
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: TextFinish | None = None


@dataclass(slots=True)
class _Request:
    index: int
    choices: list[_Choice]
    sent_ns: int
    unfinished: int
    start: TextStart | None = None
    first_token_ns: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


class GenerationJob:
    """Generates for a batch of prompts.

    Args:
        max_in_flight: choices that the engine may have at a time (a request with more is let in alone).
        on_progress: called with (finished prompts, new prompt tokens, new output tokens).
    """

    def __init__(
        self,
        prompts: Sequence[EncodedPrompt],
        params: Sequence[EngineParams],
        new_id: Callable[[], int],
        max_in_flight: int,
        on_progress: Callable[[int, int, int], None],
    ) -> None:
        self._prompts = prompts
        self._params = params
        self._new_id = new_id
        self._max_in_flight = max_in_flight
        self._on_progress = on_progress
        self._next = 0
        self._choices_in_flight = 0
        self._open: dict[int, _Request] = {}
        self._outputs: list[RequestOutput | None] = [None] * len(prompts)

    def outputs(self) -> list[RequestOutput]:
        """One for each prompt, once it is done."""
        return [each for each in self._outputs if each is not None]

    @property
    def done(self) -> bool:
        return self._next == len(self._prompts) and not self._open

    def request_ids(self) -> Iterable[int]:
        return list(self._open)

    def next_message(self) -> FrontendMessage | None:
        if self._next == len(self._prompts):
            return None
        index, params = self._next, self._params[self._next]
        if self._open and self._choices_in_flight + params.n > self._max_in_flight:
            return None
        self._next += 1
        now_ns = time.monotonic_ns()
        request_id = self._new_id()
        self._open[request_id] = _Request(index, [_Choice() for _ in range(params.n)], now_ns, params.n)
        self._choices_in_flight += params.n
        return GenerateRequest(
            request_id=request_id,
            prompt=TokenPrompt(self._prompts[index].token_ids),
            sampling=params.sampling,
            output=params.output,
            n=params.n,
            max_tokens=params.max_tokens,
            received_ns=now_ns,
            sent_ns=now_ns,
        )

    def handle(self, message: FrontendInbound) -> None:
        match message:
            case TextOutputs():
                self._on_text_outputs(message)
            case RequestRefused(request_id=request_id) if request_id in self._open:
                text = f"prompts[{self._open.pop(request_id).index}] was refused: {message.message}"
                if message.param == "bad_words":
                    raise ValueError(text)
                # Everything else that a user can do wrong was checked before.
                raise EngineError(text)
            case _:
                pass  # of a job that was given up

    def _on_text_outputs(self, outputs: TextOutputs) -> None:
        now_ns = time.monotonic_ns()
        starts = {start.row: start for start in outputs.starts}
        finishes = {finish.row: finish for finish in outputs.finishes}
        logprobs = {each.row: each.tokens for each in outputs.logprobs}
        counts, choices = unpack_i32(outputs.token_counts), unpack_i32(outputs.choices)
        token_ids = unpack_i32(outputs.token_ids).tolist()
        first, finished, prompt_tokens, output_tokens = 0, 0, 0, 0
        for row, request_id in enumerate(unpack_u64(outputs.request_ids)):
            begin, first = first, first + counts[row]
            request = self._open.get(request_id)
            if request is None:
                continue  # of a job that was given up
            choice = request.choices[choices[row]]
            if row in starts:
                prompt_tokens += self._start(request, starts[row])
            choice.texts.append(outputs.texts[row])
            choice.logprobs.extend(logprobs.get(row, ()))
            if counts[row]:
                choice.token_ids.extend(token_ids[begin:first])
                output_tokens += counts[row]
                request.first_token_ns = request.first_token_ns or now_ns
            if row in finishes:
                choice.finish = finishes[row]
                finished += self._finish_choice(request_id, request, now_ns)
        self._on_progress(finished, prompt_tokens, output_tokens)

    def _start(self, request: _Request, start: TextStart) -> int:
        """Number of prompt tokens that were not counted yet."""
        if start.prompt_logprobs is not None:
            request.prompt_logprobs = start.prompt_logprobs  # they come with choice 0
        if request.start is not None:
            return 0
        request.start = start
        return start.num_prompt_tokens

    def _finish_choice(self, request_id: int, request: _Request, now_ns: int) -> int:
        """Number of prompts that this finishes."""
        request.unfinished -= 1
        self._choices_in_flight -= 1
        if request.unfinished:
            return 0
        del self._open[request_id]
        self._outputs[request.index] = self._output(request_id, request, now_ns)
        return 1

    def _output(self, request_id: int, request: _Request, now_ns: int) -> RequestOutput:
        prompt, params = self._prompts[request.index], self._params[request.index]
        start = request.start
        with_logprobs = params.sampling.logprobs >= 0
        return RequestOutput(
            request_id=str(request_id),
            prompt=prompt.text,
            prompt_token_ids=unpack_i32(prompt.token_ids).tolist(),
            prompt_logprobs=[_logprobs(each) for each in request.prompt_logprobs]
            if params.sampling.prompt_logprobs >= 0
            else None,
            outputs=[_completion(index, choice, with_logprobs) for index, choice in enumerate(request.choices)],
            finished=True,
            metrics=RequestMetrics(
                arrival_time=request.sent_ns * 1e-9,
                first_scheduled_time=(start.first_scheduled_ns if start is not None else now_ns) * 1e-9,
                first_token_time=request.first_token_ns * 1e-9 if request.first_token_ns else None,
                finished_time=now_ns * 1e-9,
            ),
            num_cached_tokens=start.num_cached_tokens if start is not None else 0,
        )


def _completion(index: int, choice: _Choice, with_logprobs: bool) -> CompletionOutput:
    finish = choice.finish
    assert finish is not None
    failed = finish.reason in ("error", "abort")
    return CompletionOutput(
        index=index,
        text="".join(choice.texts),
        token_ids=choice.token_ids,
        cumulative_logprob=sum(each.logprob or 0.0 for each in choice.logprobs) if with_logprobs else None,
        logprobs=[_logprobs(each) or {} for each in choice.logprobs] if with_logprobs else None,
        finish_reason="stop" if finish.reason == "stop" else "length" if finish.reason == "length" else "error",
        stop_reason=finish.stop_reason,
        error=(finish.message or f"the engine ended it ({finish.reason})") if failed else None,
    )


def _logprobs(token: TokenLogprob) -> LogprobsOfPosition | None:
    if token.logprob is None:
        return None
    found = {token.token_id: Logprob(token.logprob, token.rank, token.token)}
    for rank, each in enumerate(token.top, start=1):
        found.setdefault(each.token_id, Logprob(each.logprob, rank, each.token))
    return found
