"""The tokenizer process: prompts down to the scheduler as ids, tokens up to the frontends as text.

Owns the tokenizer, the chat template, and each open choice's detokenizer and stop strings. Its neighbours are the
frontends (``frontend-<i>``) and the ``scheduler``. It never imports torch, cupy, triton or a web framework.

Requests of a frontend keep their order: short prompts are encoded at once, longer ones in a worker thread, and what
follows them waits (``encoding_lanes``). An Abort overtakes nothing but the encoding that it makes needless. What
/tokenize and /detokenize ask keeps no order with them: long questions have a thread of their own, so that nobody's
prompt waits for one.

A choice is open from its GenerateRequest to its one final row. The row is sent when the scheduler ends the choice or
when a stop string is found, whichever is first; rows that come later find no open choice and are dropped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from ringserve.actor import ActorContext, AsyncActor
from ringserve.config import TokenizerSettings
from ringserve.engine import token_questions
from ringserve.engine.detokenizer import DetokenizerFactory
from ringserve.engine.encoding_lanes import EncodingLanes, Job
from ringserve.engine.prompt_encoder import PromptEncoder, PromptError, PromptLimits
from ringserve.engine.text_batch import TextBatch
from ringserve.engine.token_outputs import TokenOutputsReader
from ringserve.engine.token_questions import TokenQuestions
from ringserve.engine.token_text import TokenText
from ringserve.engine.tokenizer_loader import TokenizerLoadError, load_tokenizer
from ringserve.engine.tokenizer_request import AdmittedRequest, RequestAdmission, RequestState
from ringserve.messages.columns import unpack_i32
from ringserve.messages.integrity import CheckIntegrity, IntegrityReport
from ringserve.messages.prompts import ChatPrompt, Prompt, TextPrompt
from ringserve.messages.requests import ALL_CHOICES, Abort, GenerateRequest, RequestRefused
from ringserve.messages.sessions import DropSession, ListSessions, SessionDropped, SessionList
from ringserve.messages.startup import ExecutorReady, LoadProgress, Started, StartFailed
from ringserve.messages.token_outputs import TokenOutputs
from ringserve.messages.tokenization import DetokenizeRequest, TokenizeRequest

logger = logging.getLogger(__name__)

_SHORT_TEXT: Final = 2_000
"""Characters that are encoded on the event loop: about 0.3 ms."""
_SHORT_IDS: Final = 4 * 4_096
"""Bytes of token ids that are checked on the event loop."""
_FEW_MESSAGES: Final = 32
_RETRY_AFTER: Final = 1.0
"""Seconds, while the model loads."""
_NUM_THREADS: Final = 2


def create(context: ActorContext) -> AsyncActor:
    """Load the tokenizer and tell the supervisor.

    Raises:
        SystemExit: it cannot be loaded; the supervisor knows why.
    """
    settings: TokenizerSettings = context.settings
    began = time.monotonic()
    try:
        loaded = load_tokenizer(settings)
        tokens = TokenText(loaded.backend)
        encoder = PromptEncoder(loaded, tokens)
        if encoder.template_problem is not None and settings.chat_template is not None:
            raise TokenizerLoadError(
                f"--chat-template {settings.chat_template}: not a Jinja template ({encoder.template_problem})"
            )
    except TokenizerLoadError as error:
        context.report(StartFailed(str(error)))
        raise SystemExit(1) from None
    if encoder.template_problem is not None:
        logger.warning("the model's chat template cannot be used: %s", encoder.template_problem)
    actor = TokenizerActor(context, encoder, tokens)
    context.report(Started({"tokenizer_seconds": round(time.monotonic() - began, 2)}))
    return actor


class TokenizerActor:
    """The actor; see the module."""

    def __init__(self, context: ActorContext, encoder: PromptEncoder, tokens: TokenText) -> None:
        self._frontends = {role: box for role, box in context.outboxes.items() if role.startswith("frontend-")}
        self._scheduler = context.outboxes["scheduler"]
        self._flush_soon = context.flush_soon
        self._encoder = encoder
        self._admission = RequestAdmission(encoder, DetokenizerFactory(tokens))
        self._requests: dict[int, RequestState] = {}
        self._outputs = TokenOutputsReader(tokens, self._requests)
        self._limits: PromptLimits | None = None
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="encode")
        self._lanes = EncodingLanes(self._threads, self._on_completed)
        self._questions = TokenQuestions(encoder, tokens)
        self._asked: set[int] = set()
        """Long questions that somebody still waits for."""
        self._question_thread = ThreadPoolExecutor(1, thread_name_prefix="question")
        self._question_lanes = EncodingLanes(self._question_thread, self._on_completed)
        self._stop = asyncio.Event()
        self._fault: BaseException | None = None

    async def run(self) -> None:
        try:
            await self._stop.wait()
        finally:
            # Joined while the loop lives, so that a running encoding's completion still finds it.
            self._question_thread.shutdown(wait=True, cancel_futures=True)
            self._threads.shutdown(wait=True, cancel_futures=True)
        if self._fault is not None:
            raise self._fault

    def request_stop(self) -> None:
        # The frontends have finished what ran before the supervisor ends this process.
        self._stop.set()

    def act(self) -> None:
        """Every message is answered in ``handle``; there is nothing to batch."""

    def handle(self, message: Any, source: str) -> None:
        match message:
            case TokenOutputs():
                self._on_token_outputs(message)
            case GenerateRequest():
                self._on_generate(message, source)
            case Abort():
                self._on_abort(message, source)
            case RequestRefused(request_id=request_id):
                self._requests.pop(request_id, None)
                self._answer(request_id, message)
            case ExecutorReady():
                ends = frozenset(unpack_i32(message.eos_token_ids))
                self._limits = PromptLimits(message.vocab_size, message.max_model_len, ends)
                self._outputs.eos_ids = ends
                self._broadcast(message)
            case LoadProgress():
                self._broadcast(message)
            case TokenizeRequest():
                self._ask(
                    message.request_id, source, lambda: self._questions.tokenize(message), _is_short(message.prompt)
                )
            case DetokenizeRequest():
                # Too many are refused by their number, which takes no time.
                is_short = not _SHORT_IDS < len(message.token_ids) <= 4 * token_questions.MAX_TOKENS
                self._ask(
                    message.request_id, source, lambda: self._questions.detokenize(message, self._limits), is_short
                )
            case CheckIntegrity(request_id=request_id):
                self._lanes.then(source, lambda: self._scheduler.send(CheckIntegrity(request_id, len(self._requests))))
            case ListSessions() | DropSession():
                self._lanes.then(source, lambda: self._scheduler.send(message))  # behind the requests before it
            case IntegrityReport(request_id=request_id) | SessionList(request_id=request_id):
                self._answer(request_id, message)
            case SessionDropped(request_id=request_id):
                self._answer(request_id, message)
            case _:
                raise TypeError(f"unexpected message {type(message).__name__} from {source}")

    # ------------------------------------------------------------------------------------------------- downwards

    def _on_generate(self, request: GenerateRequest, source: str) -> None:
        request_id, limits = request.request_id, self._limits
        if limits is None:
            self._send(
                source,
                RequestRefused(
                    request_id, 503, "The model is still loading.", "service_unavailable", retry_after=_RETRY_AFTER
                ),
            )
            return
        if request_id in self._requests:
            logger.error("%s used request id %d twice", source, request_id)
            self._send(source, RequestRefused(request_id, 500, "The request id is in use.", "server_error"))
            return
        state = self._requests[request_id] = RequestState(request_id, source, request.n)
        self._lanes.submit(
            source,
            Job(
                work=lambda: _guarded(request_id, lambda: self._admission.admit(request, limits)),
                done=lambda result: self._on_admitted(state, result),
                dropped=lambda: state.aborted,
                short=_is_short(request.prompt) and not request.resumed and not request.output.bad_words,
            ),
        )

    def _on_admitted(self, state: RequestState, result: AdmittedRequest | RequestRefused) -> None:
        if isinstance(result, RequestRefused):
            del self._requests[state.request_id]
            self._send(state.source, result)
            return
        state.admitted = result
        state.tokenized_ns = time.monotonic_ns()
        if result.stopped:
            batch = TextBatch()
            for choice, output in result.stopped:
                batch.add_final(state.request_id, choice, "stop", output.num_tokens, output.stop, output.take_text())
            self._send(state.source, batch.message())
        if not result.choices:
            del self._requests[state.request_id]
            return
        self._scheduler.send(result.stamped(state.tokenized_ns))

    def _on_abort(self, abort: Abort, source: str) -> None:
        state = self._requests.get(abort.request_id)
        if state is None:
            self._asked.discard(abort.request_id)
            return
        if state.admitted is not None:
            self._scheduler.send(abort)  # behind its request in the scheduler's ring
        elif abort.choice == ALL_CHOICES:
            state.aborted = True
            del self._requests[abort.request_id]
            batch = TextBatch()
            for choice in range(state.n):
                batch.add_final(abort.request_id, choice, "abort")
            self._send(source, batch.message())
        else:
            self._lanes.then(source, lambda: self._on_abort(abort, source))

    def _ask(self, request_id: int, source: str, work: Callable[[], Any], is_short: bool) -> None:
        """Answer a question of /tokenize or /detokenize: at once, or in the thread, behind long ones before it."""
        if is_short:
            self._send(source, _guarded(request_id, work))
            return

        def done(result: Any) -> None:
            self._asked.discard(request_id)
            self._send(source, result)

        self._asked.add(request_id)
        self._question_lanes.submit(
            source,
            Job(
                work=lambda: _guarded(request_id, work),
                done=done,
                dropped=lambda: request_id not in self._asked,
                short=False,
            ),
        )

    def _on_completed(self, fault: BaseException | None) -> None:
        """Jobs that had waited for a thread are done."""
        if fault is not None:
            # Nobody awaits a loop callback: the actor's life ends with the exception instead.
            self._fault = fault
            self._stop.set()
        self._flush_soon()

    # --------------------------------------------------------------------------------------------------- upwards

    def _on_token_outputs(self, message: TokenOutputs) -> None:
        received_ns = time.monotonic_ns()
        batches, aborts = self._outputs.read(message)
        for abort in aborts:
            self._scheduler.send(abort)
        # A message for nobody still tells all of them how the engine stands.
        for role in batches or self._frontends:
            batch = batches.get(role) or TextBatch()
            self._send(role, batch.message(message.times, message.stats, message.sent_ns, received_ns))

    def _answer(self, request_id: int, message: Any) -> None:
        self._send(f"frontend-{request_id >> 48}", message)

    def _send(self, role: str, message: Any) -> None:
        self._frontends[role].send(message)

    def _broadcast(self, message: Any) -> None:
        for box in self._frontends.values():
            box.send(message)


def _guarded(request_id: int, work: Callable[[], Any]) -> Any:
    """The result, or the refusal that answers the request: one bad prompt must not end the process."""
    try:
        return work()
    except PromptError as error:
        return error.refusal(request_id)
    # tokenizers is Rust: its panics reach Python as BaseException.
    except BaseException:
        logger.exception("encoding request %d failed", request_id)
        return RequestRefused(request_id, 500, "The prompt could not be encoded.", "server_error")


def _is_short(prompt: Prompt) -> bool:
    """Whether encoding takes well under a millisecond."""
    if isinstance(prompt, TextPrompt):
        return len(prompt.text) < _SHORT_TEXT
    if isinstance(prompt, ChatPrompt):
        # A foreign template is a program of unknown length.
        if prompt.chat_template is not None or prompt.template_kwargs or len(prompt.messages) > _FEW_MESSAGES:
            return False
        return sum(map(_size_of, prompt.messages)) < _SHORT_TEXT
    return len(prompt.token_ids) <= _SHORT_IDS


def _size_of(message: dict[str, Any]) -> int:
    """Characters of a plain message; of any other too many to be short."""
    content = message.get("content")
    return len(content) if isinstance(content, str) and len(message) == 2 else _SHORT_TEXT
