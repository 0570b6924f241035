"""Between the HTTP side and the tokenizer process: admission, the journal, and who gets which output.

The dispatcher knows no HTTP and no sockets: it is told of calls and cancellations, and fills sinks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from ringserve.config import FrontendSettings
from ringserve.frontend.errors import ApiError, ClientGone, loading, overloaded, shutting_down
from ringserve.frontend.journal import ChoiceRecord, Journal, JournalEntry
from ringserve.frontend.metrics import Metrics
from ringserve.frontend.stream import ChoiceOutput, Sink
from ringserve.messages.columns import unpack_i32, unpack_u64
from ringserve.messages.integrity import CheckIntegrity, IntegrityReport
from ringserve.messages.prompts import Prompt
from ringserve.messages.requests import NO_TARGETS, Abort, GenerateRequest, OutputParams, RequestRefused, ServiceTargets
from ringserve.messages.rings import FrontendInbound, FrontendMessage
from ringserve.messages.sampling import SamplingParams
from ringserve.messages.sessions import DropSession, ListSessions, SessionDropped, SessionInfo, SessionList, SessionRef
from ringserve.messages.startup import ExecutorReady, LoadProgress
from ringserve.messages.text_outputs import TextFinish, TextOutputs, TextStart
from ringserve.messages.tokenization import DetokenizeRequest, DetokenizeResult, TokenizeRequest, TokenizeResult
from ringserve.shm import ChannelOverflow, MessageTooLarge

if TYPE_CHECKING:
    from ringserve.actor import Outbox

logger = logging.getLogger(__name__)

Reply = TokenizeResult | DetokenizeResult | IntegrityReport | SessionList | SessionDropped


ABORT_AGAIN_AFTER = 0.1
"""Seconds."""


@dataclass(frozen=True)
class Plan:
    """What an HTTP request asks the engine for: the same for each of its prompts."""

    prompts: list[Prompt]
    sampling: SamplingParams
    output: OutputParams
    n: int
    max_tokens: int | None
    priority: int
    received_ns: int
    cache_salt: str = ""
    tenant: str = ""
    targets: ServiceTargets = NO_TARGETS
    session: SessionRef | None = None


@dataclass(eq=False)
class Call:
    """An HTTP request's share of the journal."""

    sink: Sink
    entries: list[JournalEntry[Call]] = field(default_factory=list)
    closed: bool = False


class Dispatcher:
    """One frontend's requests in flight."""

    def __init__(
        self,
        settings: FrontendSettings,
        outbox: Outbox[FrontendMessage],
        flush_soon: Callable[[], None],
        metrics: Metrics,
    ) -> None:
        self.ready: ExecutorReady | None = None
        self.progress = LoadProgress("starting", 0.0)
        self.draining = False
        self._max_num_seqs = settings.max_num_seqs
        self.max_choices = settings.max_num_seqs + settings.config.max_num_queued_reqs
        self._overload_status = settings.overload_status
        self._outbox = outbox
        self._flush_soon = flush_soon
        self._metrics = metrics
        self._journal: Journal[Call] = Journal(settings.index)
        self._replies: dict[int, asyncio.Future[Reply]] = {}
        self._touched: set[Call] = set()
        self._mean_latency = 1.0
        """Seconds, of recent choices."""

    # ------------------------------------------------------------------------------------- from the HTTP side

    def require_ready(self) -> ExecutorReady:
        """What the engine is; raises 503 while it loads or when the server is stopping."""
        if self.draining:
            raise shutting_down()
        if self.ready is None:
            raise loading()
        return self.ready

    def submit(self, plan: Plan, sink: Sink) -> Call:
        """Journal the requests of one HTTP request and send them off."""
        self.require_ready()
        wanted = plan.n * len(plan.prompts)
        self._admit(wanted)
        call = Call(sink)
        for index, prompt in enumerate(plan.prompts):
            request = GenerateRequest(
                request_id=self._journal.new_id(),
                prompt=prompt,
                sampling=plan.sampling,
                output=plan.output,
                n=plan.n,
                max_tokens=plan.max_tokens,
                priority=plan.priority,
                received_ns=plan.received_ns,
                sent_ns=time.monotonic_ns(),
                cache_salt=plan.cache_salt,
                tenant=plan.tenant,
                targets=plan.targets,
                session=plan.session,
            )
            try:
                self._send(request)  # first: what cannot be sent must not stay in the journal
            except Exception:
                self.cancel(call, ClientGone())  # nor must the prompts before it be computed for nobody
                raise
            call.entries.append(self._journal.open(request, call, index * plan.n))
        self._flush_soon()
        return call

    def cancel(self, call: Call, error: ApiError | ClientGone) -> None:
        """Give up what is unfinished: one Abort for each request; their entries stay until the final message."""
        if call.closed:
            return
        call.closed = True
        for entry in call.entries:
            entry.sink = None
            if entry.unfinished and not entry.aborted:
                entry.aborted = True
                self._abort(entry.request.request_id)
        call.sink.fail(error)
        call.sink.wake()

    def cancel_all(self, error: ApiError) -> None:
        """Shutdown ran out of time."""
        for call in {id(entry.sink): entry.sink for entry in self._journal if entry.sink is not None}.values():
            self.cancel(call, error)
        for future in self._replies.values():
            if not future.done():
                future.set_exception(error)

    async def tokenize(self, prompt: Prompt, with_strings: bool) -> TokenizeResult:
        request_id = self._journal.new_id()
        reply = await self._ask(request_id, TokenizeRequest(request_id, prompt, with_strings))
        assert isinstance(reply, TokenizeResult)
        return reply

    async def detokenize(self, token_ids: bytes) -> DetokenizeResult:
        request_id = self._journal.new_id()
        reply = await self._ask(request_id, DetokenizeRequest(request_id, token_ids))
        assert isinstance(reply, DetokenizeResult)
        return reply

    async def check_integrity(self) -> IntegrityReport:
        request_id = self._journal.new_id()
        reply = await self._ask(request_id, CheckIntegrity(request_id))
        assert isinstance(reply, IntegrityReport)
        return reply

    async def list_sessions(self, owner: str) -> tuple[SessionInfo, ...]:
        request_id = self._journal.new_id()
        reply = await self._ask(request_id, ListSessions(request_id, owner))
        assert isinstance(reply, SessionList)
        return reply.sessions

    async def drop_session(self, session: SessionRef) -> bool:
        """False if there is no such session."""
        request_id = self._journal.new_id()
        reply = await self._ask(request_id, DropSession(request_id, session))
        assert isinstance(reply, SessionDropped)
        return reply.found

    def statistics(self) -> dict[str, int]:
        """What is held; all zero when nothing is in flight."""
        return {
            "journal_entries": len(self._journal),
            "choices_in_flight": self._journal.choices_in_flight,
            "pending_replies": len(self._replies),
        }

    def journal_entries(self) -> list[JournalEntry[Call]]:
        return list(self._journal)

    def _admit(self, wanted: int) -> None:
        if self._journal.choices_in_flight + wanted > self.max_choices:
            self._metrics.on_rejected("max_num_queued_reqs")
            # Little's law: one of those in flight ends every (mean latency / their number) seconds.
            waiting = max(0, self._journal.choices_in_flight + wanted - self._max_num_seqs)
            wait = self._mean_latency * waiting / self.max_choices
            text = f"The request queue is full: {self._journal.choices_in_flight} choices of {self.max_choices}."
            raise overloaded(text, min(max(0.1, wait), 60.0), self._overload_status, wait)

    def _abort(self, request_id: int) -> None:
        """However full the way is: what finds no room is sent later."""
        try:
            self._outbox.send(Abort(request_id))
        except ChannelOverflow:
            asyncio.get_running_loop().call_later(ABORT_AGAIN_AFTER, self._abort, request_id)
        else:
            self._flush_soon()

    def _send(self, message: FrontendMessage) -> None:
        """Raises 413 or 503 for what no message can carry, or none now."""
        try:
            self._outbox.send(message)
        except MessageTooLarge:
            raise ApiError(
                413, "The request is larger than a message inside this server may be.", code="request_too_large"
            ) from None
        except ChannelOverflow:
            self._metrics.on_rejected("max_num_queued_reqs")
            text = "Too many large requests are on their way already."
            raise overloaded(text, 1.0, self._overload_status) from None

    async def _ask(self, request_id: int, message: FrontendMessage) -> Reply:
        self.require_ready()
        if len(self._replies) >= self.max_choices:
            self._metrics.on_rejected("max_num_queued_reqs")
            raise overloaded("The request queue is full.", 1.0, self._overload_status)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._replies[request_id] = future
        try:
            self._send(message)
            self._flush_soon()
            return await future
        except asyncio.CancelledError:  # whoever asked is gone: nothing need be worked out for it
            self._abort(request_id)
            raise
        finally:
            self._replies.pop(request_id, None)

    # ------------------------------------------------------------------------------ from the tokenizer process

    def handle(self, message: FrontendInbound) -> None:
        match message:
            case TextOutputs():
                self._on_text_outputs(message)
            case RequestRefused():
                self._on_refused(message)
            case TokenizeResult() | DetokenizeResult() | IntegrityReport() | SessionList() | SessionDropped():
                self._on_reply(message.request_id, message)
            case LoadProgress():
                self.progress = message
            case ExecutorReady():
                self.ready = message
                self._metrics.on_ready(message)

    def act(self) -> None:
        """Wake each task that got something, once."""
        if self._touched:
            touched, self._touched = self._touched, set()
            for call in touched:
                call.sink.wake()

    def _on_reply(self, request_id: int, reply: Reply | ApiError) -> None:
        future = self._replies.get(request_id)
        if future is None or future.done():
            return  # whoever asked is gone
        if isinstance(reply, ApiError):
            future.set_exception(reply)
        else:
            future.set_result(reply)

    def _on_refused(self, refused: RequestRefused) -> None:
        error = ApiError.of_refusal(refused)
        entry = self._journal.get(refused.request_id)
        if entry is None:
            self._on_reply(refused.request_id, error)
            return
        call = entry.sink
        self._journal.close(entry)
        self._metrics.on_refused(refused)
        if call is not None:
            self.cancel(call, error)

    def _on_text_outputs(self, outputs: TextOutputs) -> None:
        now_ns = time.monotonic_ns()
        self._metrics.on_text_outputs(outputs, now_ns)
        starts = {start.row: start for start in outputs.starts}
        finishes = {finish.row: finish for finish in outputs.finishes}
        logprobs = {each.row: each.tokens for each in outputs.logprobs}
        request_ids, choices = unpack_u64(outputs.request_ids), unpack_i32(outputs.choices)
        counts, token_ids = unpack_i32(outputs.token_counts), unpack_i32(outputs.token_ids)
        first = 0
        for row, request_id in enumerate(request_ids):
            tokens = token_ids[first : first + counts[row]].tolist()
            first += counts[row]
            entry = self._journal.get(request_id)
            if entry is None or entry.choices[choices[row]].finish_reason is not None:
                logger.error("output for request %d, choice %d, which is over", request_id, choices[row])
                continue
            output = ChoiceOutput(
                entry.choice_offset + choices[row],
                outputs.texts[row],
                tokens,
                logprobs.get(row, ()),
                starts.get(row),
                finishes.get(row),
            )
            self._on_row(entry, choices[row], output, now_ns)

    def _on_row(self, entry: JournalEntry[Call], choice: int, output: ChoiceOutput, now_ns: int) -> None:
        record = entry.choices[choice]
        if output.start is not None:
            output.start = self._on_start(entry, record, output.start)
        if output.token_ids:
            self._on_tokens(entry, record, output.token_ids, now_ns)
        record.characters_sent += len(output.text)
        if output.finish is not None:
            self._on_finish(entry, choice, output.finish, now_ns)
        call = entry.sink
        if call is None:
            return
        if call.sink.put(output):
            self._touched.add(call)
        else:
            self._metrics.on_slow_client()
            self.cancel(call, ClientGone("the client did not read its stream"))

    def _on_start(self, entry: JournalEntry[Call], record: ChoiceRecord, start: TextStart) -> TextStart:
        record.started = True
        record.queued_ns, record.first_scheduled_ns = start.queued_ns, start.first_scheduled_ns
        if entry.num_prompt_tokens is None:
            entry.num_prompt_tokens = start.num_prompt_tokens
            self._metrics.on_prompt(start, entry.request)
        if start.prompt_logprobs is not None:
            entry.prompt_logprobs = start.prompt_logprobs
        elif entry.prompt_logprobs is not None:
            return msgspec.structs.replace(start, prompt_logprobs=entry.prompt_logprobs)
        return start

    def _on_tokens(self, entry: JournalEntry[Call], record: ChoiceRecord, tokens: list[int], now_ns: int) -> None:
        record.token_ids.extend(tokens)
        self._metrics.on_tokens(len(tokens))
        if record.first_token_ns:
            self._metrics.on_next_token(record.last_token_ns, now_ns)
        else:
            record.first_token_ns = now_ns
            self._metrics.on_first_token(entry.request.received_ns, now_ns)
        record.last_token_ns = now_ns

    def _on_finish(self, entry: JournalEntry[Call], choice: int, finish: TextFinish, now_ns: int) -> None:
        record = entry.choices[choice]
        self._metrics.on_tokens(max(0, finish.num_output_tokens - len(record.token_ids)))  # counted, not sent
        self._journal.finish_choice(entry, choice, finish.reason)
        self._metrics.on_finish(
            finish.reason,
            finish.num_output_tokens,
            received_ns=entry.request.received_ns,
            queued_ns=record.queued_ns,
            first_scheduled_ns=record.first_scheduled_ns,
            first_token_ns=record.first_token_ns,
            last_token_ns=record.last_token_ns,
            now_ns=now_ns,
        )
        self._mean_latency += 0.1 * ((now_ns - entry.request.received_ns) * 1e-9 - self._mean_latency)
        if entry.unfinished == 0:
            self._metrics.on_request_finish(max(len(each.token_ids) for each in entry.choices))
