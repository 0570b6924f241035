"""A step of the engine between scheduler and executor.

    scheduler --SchedulerOutput----> executor
    scheduler <--ModelRunnerOutput-- executor

Sequences are named by their slots here; requests, and text, are unknown to the executor.
"""

from __future__ import annotations

from ringserve.messages.logprobs import LogprobColumns, SlotPromptLogprobs
from ringserve.messages.sampling import SamplingParams
from ringserve.messages.structs import Message, Part


class NewSequence(Part, frozen=True):
    """A sequence sent whole: new, resumed or preempted before. Resets its slot."""

    slot: int
    token_ids: bytes
    """int32: the prompt and whatever was generated before."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens whose keys and values already lie in the pages (prefix hits), or do once this step's swaps are done."""
    choice: int
    sampling: SamplingParams
    max_tokens: int


class PageSwaps(Part, frozen=True):
    """Pages that go to the host's swap space, and pages that come back; all columns int32.

    Done before the step is: first everything that goes out, entry by entry, then everything that comes in. A page that
    goes out may be among the step's ``new_pages``, or be one that something comes into. What comes in may have gone out
    with this very message.
    """

    out_pages: bytes
    """Of the KV pool."""
    out_host_pages: bytes
    """Where each of them goes: 0 .. ``num_host_pages`` - 1."""
    in_pages: bytes
    """Of the KV pool."""
    in_host_pages: bytes
    """Where each of them comes from; free afterwards."""


class SchedulerOutput(Message, frozen=True):
    """One step: only what changed since the last one.

    Row ``i`` advances the sequence in ``slots[i]`` by ``num_tokens[i]`` of its tokens. The executor keeps, for each
    slot, all token ids (it appends what it samples itself), the number computed, and the block table. A row that
    reaches the last known token samples one.
    """

    step_id: int
    new_sequences: tuple[NewSequence, ...]
    """Each of them also has a row."""
    slots: bytes
    """int32, distinct."""
    num_tokens: bytes
    """int32, >= 1."""
    new_page_counts: bytes
    """int32, one for each row: how many entries of ``new_pages`` are appended to its block table."""
    new_pages: bytes
    """int32 page ids, in the order of the rows."""
    freed_slots: bytes
    """int32: freed before this step's rows are looked at; the slot may be reused by ``new_sequences`` at once."""
    sent_ns: int = 0
    swaps: PageSwaps | None = None
    """None in the usual step."""


class ModelRunnerOutput(Message, frozen=True):
    """A step's result: one row for each sequence that sampled a token, in the order of the step's rows."""

    step_id: int
    slots: bytes
    """int32."""
    token_ids: bytes
    """int32, one for each slot."""
    logprobs: LogprobColumns | None
    prompt_logprobs: tuple[SlotPromptLogprobs, ...]
    received_ns: int
    started_ns: int
    sent_ns: int
    failed_slots: tuple[tuple[int, str], ...] = ()
    """Sequences that could not be sampled (for example no finite logit), with the reason; no row above."""
