"""The scheduler's books, audited: what ``Scheduler.check_integrity`` looks at.

Written against what must hold between the queues, the slots, the pages and the steps in flight, not against how the
scheduler keeps it so. Takes time that grows with everything held; run after every step in tests, and on demand on a
live server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import compress

from ringserve.engine.scheduler_step import StepRecord
from ringserve.engine.sequence import Request, Sequence, SequenceStatus


def check_running(running: Iterable[Sequence], page_size: int) -> list[str]:
    """Each running sequence's own numbers."""
    problems = []
    for sequence in running:
        if not 0 <= sequence.num_computed_tokens <= sequence.num_known_tokens:
            problems.append(f"{sequence} has computed more than is known")
        if sequence.num_computed_tokens > len(sequence.block_table) * page_size:
            problems.append(f"{sequence} has computed more than its pages hold")
        if sequence.num_known_tokens > sequence.request.max_total_tokens:
            problems.append(f"{sequence} is longer than allowed")
    return problems


def check_waiting(waiting: Iterable[Sequence]) -> list[str]:
    """Whoever waits holds nothing (host pages apart)."""
    return [
        f"{sequence} waits and holds something"
        for sequence in waiting
        if sequence.slot != -1 or sequence.block_table or sequence.num_computed_tokens
    ]


def check_known(sequences: Iterable[Sequence]) -> list[str]:
    """What is kept as a sum is one."""
    return [
        f"{each} is taken to have {each.num_known_tokens} tokens"
        for each in sequences
        if each.num_known_tokens
        != each.request.num_prompt_tokens + len(each.output_token_ids) + each.num_pending_tokens
    ]


def check_slots(running: Iterable[Sequence], free_slots: Iterable[int], max_num_seqs: int) -> list[str]:
    """Each slot is free or has one owner."""
    slots = sorted([*(sequence.slot for sequence in running), *free_slots])
    return [] if slots == list(range(max_num_seqs)) else [f"slots are lost or shared: {slots}"]


def check_queues(
    running: Iterable[Sequence], waiting: Iterable[Sequence], requests: Mapping[int, Request]
) -> list[str]:
    """Every live sequence is in one queue."""
    problems = []
    queue = [*running, *waiting]
    live = [sequence for request in requests.values() for sequence in request.live.values()]
    if Counter(live) != Counter(queue):
        problems.append(f"requests hold {live}, the queues {queue}")
    for status, group in ((SequenceStatus.RUNNING, running), (SequenceStatus.WAITING, waiting)):
        problems += [f"{sequence} is among the {status.value}" for sequence in group if sequence.status is not status]
    problems += [f"request {key} is over and held" for key, request in requests.items() if not request.live]
    return problems


def check_in_flight(
    sequences: Iterable[Sequence], in_flight: Collection[StepRecord], max_steps_in_flight: int
) -> list[str]:
    """Each live sequence awaits as many tokens as the steps in flight draw for it."""
    pending: Counter[Sequence] = Counter()
    for record in in_flight:
        pending.update(compress(record.sequences, record.samples))
    problems = [
        f"{sequence} awaits {sequence.num_pending_tokens} tokens, in flight are {pending[sequence]}"
        for sequence in sequences
        if sequence.num_pending_tokens != pending[sequence]
    ]
    if len(in_flight) > max_steps_in_flight:
        problems.append(f"{len(in_flight)} steps are in flight")
    return problems
