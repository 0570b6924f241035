"""Who sends what and when: the load generator of ``ringserve bench`` on a virtual clock.

It takes the same jobs and the same paces. Token ids are those of the jobs; texts become random ids, as many as their
estimated tokens. A later turn of a conversation carries all before it, with the answers' tokens as the simulated model
drew them.
"""

from __future__ import annotations

import heapq
import random
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ringserve.bench.load import ClosedLoop, OpenLoop
from ringserve.bench.prompts import Job, Prompt, estimate_tokens
from ringserve.messages.requests import NO_TARGETS, ServiceTargets, TokenizedRequest
from ringserve.messages.sampling import SamplingParams
from ringserve.messages.sessions import SessionRef

SAMPLING = SamplingParams(seed=0, ignore_eos=True)
"""Answers have exactly the length asked for."""
REFUSED_NS = 10_000_000
"""What it takes to be refused and to ask again, at the least."""


@dataclass(frozen=True)
class Tenant:
    """What the requests of one tenant have in common."""

    share: float = 1.0
    """Of the conversations, over the sum of all shares."""
    priority: int = 0
    deadline_ms: float = 0.0
    """From sending a request to its last token; 0: none."""


@dataclass(slots=True)
class Conversation:
    """A job on its way through its turns."""

    job: Job
    tenant: str
    priority: int
    deadline_ms: float
    session: SessionRef | None
    turn: int = 0
    token_ids: bytes = b""
    """int32: what was said so far, questions and answers."""


@dataclass(slots=True)
class SentRequest:
    """One request and what has become of it. Times in ns after the start."""

    conversation: Conversation
    sent_ns: int
    num_prompt_tokens: int
    first_token_ns: int = -1
    last_token_ns: int = -1
    ended_ns: int = -1
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    refused: str = ""
    """Why nothing of it was computed, or why it ended badly."""
    answer: array[int] | None = None
    """Token ids, kept where a later turn will carry them."""


@dataclass
class Client:
    """Sends jobs at a pace."""

    jobs: Iterator[Job]
    pace: ClosedLoop | OpenLoop
    seed: str
    tenants: Mapping[str, Tenant] = field(default_factory=lambda: {"": Tenant()})
    think_time_s: float = 0.0
    sessions: bool = False
    """Each conversation is a session."""
    overhead_s: float = 0.0
    """From sending a request to the scheduler's queue."""
    duration_s: float | None = None
    """No conversation starts after it."""
    _due: list[tuple[int, int, Conversation | None]] = field(default_factory=list)
    """A heap of (when sent, order, the conversation, or None for the next job)."""
    _held: deque[Conversation] = field(default_factory=deque)
    """Open loop with a bound: those that it holds back."""
    _num_active: int = 0
    _order: int = 0
    _num_conversations: int = 0
    _next_id: int = 0

    def __post_init__(self) -> None:
        self._rng = random.Random(f"{self.seed} tenants")
        self._names = list(self.tenants)
        self._shares = [tenant.share for tenant in self.tenants.values()]
        self._overhead_ns = round(self.overhead_s * 1e9)
        self._until_ns = None if self.duration_s is None else round(self.duration_s * 1e9)
        match self.pace:
            case ClosedLoop(concurrency, ramp):
                for index in range(concurrency):
                    self._push(round(ramp * index / concurrency * 1e9), None)
            case OpenLoop(times):
                self._times = times
                self._push_next_arrival()

    @property
    def next_ns(self) -> int | None:
        """When the next request reaches the scheduler; None if only an answer can bring one."""
        return self._due[0][0] + self._overhead_ns if self._due else None

    def take_due(self, now_ns: int) -> Iterator[tuple[TokenizedRequest, SentRequest]]:
        """The requests that have reached the scheduler by now."""
        while self._due and self._due[0][0] + self._overhead_ns <= now_ns:
            sent_ns, _, conversation = heapq.heappop(self._due)
            if conversation is None:
                conversation = self._start(sent_ns)
            if conversation is not None:
                yield self._request(conversation, sent_ns)

    def on_end(self, request: SentRequest) -> None:
        """A request is over: its conversation goes on, or makes room for the next."""
        conversation = request.conversation
        conversation.turn += 1
        now_ns = request.ended_ns
        if not request.refused and conversation.turn < len(conversation.job.turns):
            if request.answer is not None:
                conversation.token_ids += request.answer.tobytes()
            self._push(now_ns + round(self.think_time_s * 1e9), conversation)
            return
        self._num_active -= 1
        match self.pace:
            case ClosedLoop():
                # Who is refused at once does not ask again at once: the clock would stand still.
                self._push(max(now_ns, request.sent_ns + REFUSED_NS) if request.refused else now_ns, None)
            case OpenLoop():
                if self._held:
                    self._num_active += 1
                    self._push(now_ns, self._held.popleft())

    def _start(self, now_ns: int) -> Conversation | None:
        """The next job's first turn, unless there is none or it has to be held back."""
        conversation = self._next_conversation(now_ns)
        if conversation is None:
            return None
        if isinstance(self.pace, OpenLoop):
            self._push_next_arrival()
            limit = self.pace.max_concurrency
            if limit is not None and self._num_active >= limit:
                self._held.append(conversation)
                return None
        self._num_active += 1
        return conversation

    def _next_conversation(self, now_ns: int) -> Conversation | None:
        if self._until_ns is not None and now_ns >= self._until_ns:
            return None
        job = next(self.jobs, None)
        if job is None:
            return None
        (name,) = self._rng.choices(self._names, self._shares)
        tenant = self.tenants[name]
        self._num_conversations += 1
        session = SessionRef(name, str(self._num_conversations)) if self.sessions else None
        return Conversation(job, name, tenant.priority, tenant.deadline_ms, session)

    def _push_next_arrival(self) -> None:
        at = next(self._times, None)
        if at is not None:
            self._push(round(at * 1e9), None)

    def _push(self, sent_ns: int, conversation: Conversation | None) -> None:
        self._order += 1
        heapq.heappush(self._due, (sent_ns, self._order, conversation))

    def _request(self, conversation: Conversation, sent_ns: int) -> tuple[TokenizedRequest, SentRequest]:
        turn = conversation.job.turns[conversation.turn]
        prompt = conversation.token_ids + packed_ids(turn.prompt)
        more = conversation.turn + 1 < len(conversation.job.turns)
        if more:
            conversation.token_ids = prompt
        sent = SentRequest(conversation, sent_ns, len(prompt) // 4, answer=array("i") if more else None)
        self._next_id += 1
        deadline_ns = round(conversation.deadline_ms * 1e6)
        message = TokenizedRequest(
            request_id=self._next_id,
            prompt_token_ids=prompt,
            sampling=SAMPLING,
            n=1,
            max_tokens=turn.output_tokens,
            priority=conversation.priority,
            tenant=conversation.tenant,
            session=conversation.session,
            targets=ServiceTargets(due_ns=sent_ns + deadline_ns) if deadline_ns else NO_TARGETS,
        )
        return message, sent


def packed_ids(prompt: Prompt) -> bytes:
    """int32 token ids of a prompt; a text stands for random ones."""
    if isinstance(prompt, str):
        count = estimate_tokens(prompt)
        return array("i", random.Random(prompt).choices(range(1 << 20), k=count)).tobytes()
    return array("i", prompt).tobytes()
