"""The rest of the server as the frontend sees it: an in-memory tokenizer process that speaks ``messages``.

Deterministic: every word is a token, the answer's token ``i`` is ``WORDS[i % len(WORDS)]``. Output comes in steps; a
step is run by the event loop's next turn, or, while ``hold`` is set, by ``step()``. Messages in both directions pass
through msgspec's encoder and decoder, as on the rings.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ringserve.messages.columns import pack_i32, pack_u64, unpack_i32
from ringserve.messages.integrity import CheckIntegrity, IntegrityReport
from ringserve.messages.logprobs import CandidateLogprob, TokenLogprob
from ringserve.messages.prompts import ChatPrompt, Prompt, TextPrompt
from ringserve.messages.requests import Abort, FinishReason, GenerateRequest, RequestRefused
from ringserve.messages.rings import FrontendInbound, FrontendMessage
from ringserve.messages.sampling import SamplingDefaults
from ringserve.messages.sessions import DropSession, ListSessions, SessionDropped, SessionInfo, SessionList, SessionRef
from ringserve.messages.startup import ExecutorReady
from ringserve.messages.stats import EngineStats, StepTimes
from ringserve.messages.text_outputs import TextFinish, TextLogprobs, TextOutputs, TextStart
from ringserve.messages.tokenization import DetokenizeRequest, DetokenizeResult, TokenizeRequest, TokenizeResult

WORDS = (" alpha", " beta", " gamma", " émile", " 日本", " 👩‍🚀", " eta", " theta")
MAX_MODEL_LEN = 512
VOCAB_SIZE = 1000
READY = ExecutorReady(
    vocab_size=VOCAB_SIZE,
    max_model_len=MAX_MODEL_LEN,
    eos_token_ids=pack_i32([0]),
    num_pages=64,
    page_size=64,
    max_num_seqs=8,
    max_num_batched_tokens=256,
    dtype="bfloat16",
    kv_dtype="bfloat16",
    device="cpu",
    architecture="Fake",
    defaults=SamplingDefaults(temperature=0.7, top_p=0.9),
)


@dataclass
class Running:
    """A choice being generated."""

    request: GenerateRequest
    choice: int
    prompt_ids: list[int]
    max_tokens: int
    clamped: bool
    produced: int = 0
    started: bool = False
    aborted: bool = False
    fail: bool = False


@dataclass
class FakeTokenizer:
    """An Outbox; ``deliver`` is the frontend's ``handle`` and ``act``."""

    deliver: Callable[[list[FrontendInbound]], None] = lambda messages: None
    received: list[FrontendMessage] = field(default_factory=list)
    hold: bool = False
    auto_final: bool = True
    """Abort is answered by the final message at once (else by ``finish_aborted``)."""
    step_text: str | None = None
    """Every token's text, instead of a word."""
    mute: bool = False
    """Questions get no answer."""
    fail_after: int | None = None
    """Tokens after which a choice ends with an error."""
    running: list[Running] = field(default_factory=list)
    finished: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    sessions: dict[SessionRef, SessionInfo] = field(default_factory=dict)
    """What the scheduler keeps."""

    def __post_init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._in: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FrontendMessage)
        self._out: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FrontendInbound)
        self._scheduled = False

    # ---------------------------------------------------------------------------------------------- Outbox

    def send(self, message: FrontendMessage) -> None:
        message = self._in.decode(self._encoder.encode(message))
        self.received.append(message)
        match message:
            case GenerateRequest():
                self._generate(message)
            case Abort():
                self._abort(message)
            case TokenizeRequest():
                ids = _ids(message.prompt)
                strings = tuple(f"<{each}>" for each in ids) if message.with_strings else None
                self._later([TokenizeResult(message.request_id, pack_i32(ids), strings)])
            case DetokenizeRequest():
                text = " ".join(str(each) for each in unpack_i32(message.token_ids))
                self._later([DetokenizeResult(message.request_id, text)])
            case ListSessions():
                infos = [info for ref, info in self.sessions.items() if ref.owner == message.owner]
                self._later([SessionList(message.request_id, tuple(infos))])
            case DropSession():
                found = self.sessions.pop(message.session, None) is not None
                self._later([SessionDropped(message.request_id, found)])
            case CheckIntegrity():
                self._later([IntegrityReport(message.request_id, (), 64, 64, len(self.running), len(self.running), 8)])

    def of_kind(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.received if isinstance(message, kind)]

    # --------------------------------------------------------------------------------------------- requests

    def _generate(self, request: GenerateRequest) -> None:
        ids = _ids(request.prompt)
        if len(ids) >= MAX_MODEL_LEN:
            text = (
                f"This model's maximum context length is {MAX_MODEL_LEN} tokens. However, your prompt has {len(ids)}."
            )
            self._later([RequestRefused(request.request_id, 400, text, param="prompt", code="context_length_exceeded")])
            return
        room = MAX_MODEL_LEN - len(ids)
        asked = room if request.max_tokens is None else request.max_tokens
        for choice in range(request.n):
            clamped = request.max_tokens is not None and asked > room
            self.running.append(Running(request, choice, ids, min(asked, room), clamped))
        self._schedule()

    def _abort(self, abort: Abort) -> None:
        for each in self.running:
            if each.request.request_id == abort.request_id and abort.choice in (-1, each.choice):
                each.aborted = True
        if self.auto_final:
            self._schedule(forced=True)

    # ------------------------------------------------------------------------------------------------ steps

    def _schedule(self, forced: bool = False) -> None:
        if not self._scheduled and (forced or not self.hold):
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        if self.hold:
            self.finish_aborted()
            return
        self.step()
        if self.running:
            self._schedule()

    def finish_aborted(self) -> None:
        """The final messages of what was aborted."""
        self._step([each for each in self.running if each.aborted])

    def step(self) -> None:
        """One token for every choice."""
        self._step(list(self.running))

    def _step(self, rows: list[Running]) -> None:
        if not rows:
            return
        now = time.monotonic_ns()
        self.steps += 1
        starts, finishes, logprobs, texts, counts, ids = [], [], [], [], [], []
        for row, each in enumerate(rows):
            if not each.started:
                each.started = True
                starts.append(self._start(row, each, now))
            text, token = self._token(each)
            texts.append(text)
            counts.append(int(token is not None))
            if token is not None:
                ids.append(token)
                if each.request.sampling.logprobs >= 0:
                    logprobs.append(TextLogprobs(row, (_logprob(token, text, each.request.sampling.logprobs),)))
            reason = self._reason(each)
            if reason is not None:
                finishes.append(_finish(row, each, reason))
                self.finished[reason] = self.finished.get(reason, 0) + 1
                self.running.remove(each)
        self.tokens += len(ids)
        times = StepTimes(self.steps, now - 600, now - 500, now - 400, now - 200, now - 100, len(ids) or 1, len(rows))
        self._deliver(
            TextOutputs(
                request_ids=pack_u64(each.request.request_id for each in rows),
                choices=pack_i32(each.choice for each in rows),
                texts=tuple(texts),
                token_counts=pack_i32(counts),
                token_ids=pack_i32(ids),
                starts=tuple(starts),
                finishes=tuple(finishes),
                logprobs=tuple(logprobs),
                times=times,
                stats=EngineStats(len(self.running), 3, 48, 64, self.preemptions, 7, self.steps, self.tokens, 10, 5),
                tokens_sent_ns=now - 90,
                received_ns=now - 80,
                sent_ns=now - 70,
            )
        )

    def _token(self, each: Running) -> tuple[str, int | None]:
        if each.aborted or each.produced >= each.max_tokens:
            return "", None
        word = WORDS[each.produced % len(WORDS)] if self.step_text is None else self.step_text
        token = 100 + each.produced % len(WORDS)
        each.produced += 1
        return word, token

    def _reason(self, each: Running) -> FinishReason | None:
        if each.aborted:
            return "abort"
        if self.fail_after is not None and each.produced >= self.fail_after:
            return "error"
        return "length" if each.produced >= each.max_tokens else None

    def _start(self, row: int, each: Running, now: int) -> TextStart:
        request = each.request
        echo = request.output.echo
        prompt_logprobs = None
        if request.sampling.prompt_logprobs >= 0 and each.choice == 0:
            prompt_logprobs = tuple(
                _logprob(token, text, request.sampling.prompt_logprobs, first=index == 0)
                for index, (token, text) in enumerate(zip(each.prompt_ids, _pieces(request.prompt), strict=True))
            )
        return TextStart(
            row=row,
            num_prompt_tokens=len(each.prompt_ids),
            num_cached_tokens=1,
            received_ns=request.received_ns,
            tokenized_ns=request.sent_ns,
            queued_ns=now - 2000,
            first_scheduled_ns=now - 1000,
            max_tokens=each.max_tokens,
            max_tokens_clamped=each.clamped,
            prompt_token_ids=pack_i32(each.prompt_ids) if echo else b"",
            prompt_text="".join(_pieces(request.prompt)) if echo else None,
            prompt_logprobs=prompt_logprobs,
        )

    # --------------------------------------------------------------------------------------------- delivery

    def _later(self, messages: list[FrontendInbound]) -> None:
        if self.mute:
            return
        asyncio.get_running_loop().call_soon(self._deliver, *messages)

    def _deliver(self, *messages: FrontendInbound) -> None:
        self.deliver([self._out.decode(self._encoder.encode(message)) for message in messages])


def _pieces(prompt: Prompt) -> list[str]:
    """The prompt's tokens as text."""
    match prompt:
        case TextPrompt():
            words = prompt.text.split(" ")
            return [word if index == 0 else f" {word}" for index, word in enumerate(words)]
        case ChatPrompt():
            return [f"<{message['role']}>{message['content']}" for message in prompt.messages]
        case _:
            return [f" {token}" for token in unpack_i32(prompt.token_ids)]


def _ids(prompt: Prompt) -> list[int]:
    if isinstance(prompt, TextPrompt | ChatPrompt):
        return list(range(len(_pieces(prompt))))
    return unpack_i32(prompt.token_ids).tolist()


def _logprob(token: int, text: str, num_top: int, first: bool = False) -> TokenLogprob:
    top = tuple(
        CandidateLogprob(token + k, f"{text}{k}", f"{text}{k}".encode(), -0.5 * (k + 1)) for k in range(num_top)
    )
    return TokenLogprob(token, text, text.encode(), None if first else -0.25, 1, () if first else top)


def _finish(row: int, each: Running, reason: FinishReason) -> TextFinish:
    message = "the model gave no finite logit" if reason == "error" else ""
    return TextFinish(row, reason, None, each.produced, 0, message)
