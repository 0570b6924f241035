"""A request and its sequences, as the scheduler keeps them.

``n`` choices of a request are ``n`` sequences keyed ``(request_id, choice)``. They share the prompt's bytes; nothing
else of one is ever touched by another.

A sequence's tokens are known in three stages::

    prompt tokens | generated tokens, here | pending tokens: sampled by a step that is in flight
    <------------------------- num_known_tokens ------------------------------------------------>
    <------- num_computed_tokens: keys and values are computed, counting steps in flight --->

There is no prefill phase and no decode phase: whatever is known and not computed is what may be scheduled.
"""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field

import msgspec

from ringserve.engine.page_cache import PageKey
from ringserve.messages.columns import unpack_i32
from ringserve.messages.requests import TokenizedRequest
from ringserve.messages.sampling import SamplingParams
from ringserve.messages.sessions import SessionRef


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    """In the queue; holds no slot and no page (new, or preempted); the swap space may have its pages."""
    RUNNING = "running"
    """Holds a slot and pages."""
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """What the choices of a request have in common."""

    request_id: int
    prompt_token_ids: bytes
    """int32."""
    num_prompt_tokens: int
    sampling: SamplingParams
    sampling_without_prompt_logprobs: SamplingParams
    stop_token_ids: frozenset[int]
    end_token_ids: frozenset[int]
    """Those, and the model's end-of-sequence tokens unless they are ignored."""
    max_tokens: int
    max_total_tokens: int
    """Prompt and generated tokens together, where generation ends at the latest."""
    queued_ns: int
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    """Pages are shared among requests with the same salt only."""
    prompt_page_keys: list[PageKey] = field(default_factory=list)
    """Names of the prompt's full pages, once anybody asked."""
    due_ns: int = 0
    """When its last token is due; 0: whenever."""
    first_token_due_ns: int = 0
    time_per_token_ns: int = 0
    """Between tokens; 0: whatever it takes."""
    latest_start_ns: int = 0
    """When it must start at the latest to be served in time; 0: not known."""
    n: int = 1
    is_resumed: bool = False
    """It entered with tokens generated before."""
    session: SessionRef | None = None
    """The conversation that it is a turn of."""
    live: dict[int, Sequence] = field(default_factory=dict)
    """The choices that are not over."""

    @property
    def has_deadline(self) -> bool:
        return bool(self.due_ns or self.first_token_due_ns)

    @property
    def is_untouched(self) -> bool:
        """Nothing of it was computed, here or before it came here, and no choice is over."""
        if self.is_resumed or len(self.live) < self.n:
            return False
        return not any(sequence.first_scheduled_ns for sequence in self.live.values())

    @staticmethod
    def of(message: TokenizedRequest, max_model_len: int, eos_token_ids: frozenset[int], now_ns: int) -> Request:
        num_prompt_tokens = len(message.prompt_token_ids) // 4
        sampling = message.sampling
        stop_token_ids = frozenset(unpack_i32(sampling.stop_token_ids))
        return Request(
            request_id=message.request_id,
            prompt_token_ids=message.prompt_token_ids,
            num_prompt_tokens=num_prompt_tokens,
            sampling=sampling,
            sampling_without_prompt_logprobs=msgspec.structs.replace(sampling, prompt_logprobs=-1),
            stop_token_ids=stop_token_ids,
            end_token_ids=stop_token_ids if sampling.ignore_eos else stop_token_ids | eos_token_ids,
            max_tokens=message.max_tokens,
            # With max_tokens == 0 the step that ends the prompt is awaited like one that samples, and yields nothing.
            max_total_tokens=min(num_prompt_tokens + max(message.max_tokens, 1), max_model_len),
            queued_ns=now_ns,
            priority=message.priority,
            tenant=message.tenant,
            cache_salt=message.cache_salt,
            session=message.session,
            n=message.n,
            is_resumed=bool(message.resumed),
            due_ns=message.targets.due_ns,
            first_token_due_ns=message.targets.first_token_due_ns,
            time_per_token_ns=message.targets.time_per_token_ns,
        )


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request."""

    request: Request
    choice: int
    arrival: int
    """Smaller came first."""
    rank: tuple[float, int] = (0.0, 0)
    """Its place among the others, where the policy gives it one for life."""
    output_token_ids: array[int] = field(default_factory=lambda: array("i"))
    """Generated tokens whose results are back (or that the request entered with)."""
    status: SequenceStatus = SequenceStatus.WAITING
    slot: int = -1
    """The executor's slot while running."""
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    """Counting the steps in flight."""
    num_pending_tokens: int = 0
    """Tokens that steps in flight sample."""
    num_known_tokens: int = field(init=False)
    """All tokens, those pending counted. Kept, not summed up: it is asked for several times for each step."""
    max_total_tokens: int = field(init=False)
    """The request's."""
    max_output_tokens: int = field(init=False)
    """Generated tokens with which it is over at the latest."""
    num_preemptions: int = 0
    num_thrown_away: int = 0
    """Tokens that were computed when it was preempted last, until it resumes."""
    num_swapped_tokens: int = 0
    """Tokens whose keys and values wait for it on the host (``swapping.py``)."""
    first_scheduled_ns: int = 0
    """0: not yet."""
    started: bool = False
    """Its first row has left the scheduler."""
    next_prompt_logprob: int = 0
    """Prompt positions below it have been handed on."""
    page_keys: list[PageKey] = field(default_factory=list)
    """Names of the full pages of its tokens, as far as anybody asked."""
    num_registered_pages: int = 0
    """Pages at the head of the block table that the prefix cache has been told of (or that came from it)."""
    num_tail_tokens: int = 0
    """Of the cached pages that were found for it last: tokens in the last one, where that is not full; else 0."""
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache when it first started."""

    def __post_init__(self) -> None:
        self.num_known_tokens = self.request.num_prompt_tokens + len(self.output_token_ids)
        self.max_total_tokens = self.request.max_total_tokens
        self.max_output_tokens = min(self.request.max_tokens, self.max_total_tokens - self.request.num_prompt_tokens)

    @property
    def num_schedulable_tokens(self) -> int:
        """Tokens the next step may compute. None once everything the length allows is sampled or being sampled."""
        known = self.num_known_tokens
        return known - self.num_computed_tokens if known < self.max_total_tokens else 0

    def token_bytes(self, start: int, stop: int) -> bytes:
        """The tokens ``[start, stop)``, which must be known by value, as int32."""
        num_prompt_tokens = self.request.num_prompt_tokens
        if start >= num_prompt_tokens:
            return self.output_token_ids[start - num_prompt_tokens : stop - num_prompt_tokens].tobytes()
        generated = self.output_token_ids[max(start - num_prompt_tokens, 0) : max(stop - num_prompt_tokens, 0)]
        return self.request.prompt_token_ids[4 * start : 4 * stop] + generated.tobytes()

    @property
    def sampling(self) -> SamplingParams:
        """What the executor is told: prompt log probabilities are computed for choice 0 only, and not twice."""
        request = self.request
        if self.choice == 0 and self.next_prompt_logprob < request.num_prompt_tokens:
            return request.sampling
        return request.sampling_without_prompt_logprobs

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.request_id}/{self.choice}, {self.status.value}, slot {self.slot}, "
            f"{self.request.num_prompt_tokens}+{len(self.output_token_ids)}+{self.num_pending_tokens} tokens, "
            f"{self.num_computed_tokens} computed, pages {self.block_table})"
        )
