"""Preempted sequences whose pages go to the host and come back, instead of being computed again.

    preempted    swap_out    its computed tokens' pages are copied to host pages; the KV pages are free at once
    waits        it holds host pages, no KV page and no slot
    resumes      swap_in     it starts with new KV pages, into which come those that the prefix cache has lost meanwhile
    is over      forget      the host pages are free

Whether it is worth it, the costs say (``SwapCosts``): two copies against what the step-time model predicts for
computing the tokens again. Where the swap space is full, or it is not worth it, the sequence is computed again.

What goes out is everything that is computed, also pages that the prefix cache can find or that others hold. Those are
free to be given out, or will be, by the time the sequence resumes, and with one page missing in front all those behind
it are worth nothing; a copy out costs no other sequence anything but bus time. What comes in is the rest: first the
cache is asked, as ever, and only pages behind the last that it still has are copied back.

Order is what makes it right, with any number of steps in flight. Swaps are done in the order of the messages, each
before the step of its message:

* ``num_computed_tokens`` counts the steps in flight. They run before the swap, so that what goes out is complete; the
  token that a step in flight draws is not computed yet, and comes with its result, before the sequence may resume.
* The KV pages are given away at once: whoever gets them writes in the step of this message or later.
* A plan may come to nothing (nobody can advance) and be thrown away with its message: what was to go out then goes
  with the next message, before which nobody has written either. If the same sequence resumes by then, its pages go
  out and come back with that one.
* In one message all that goes out comes before all that comes in: something may come into a page that is swapped out
  by the same message. So a host page must not be given away by the plan that reads it: those of resumed sequences are
  freed when the message is made (``take``).

This module knows numbers and pages; copying is ``page_swaps.py``'s business, in the executor.
"""

from __future__ import annotations

from collections.abc import Iterable

from ringserve.engine.sequence import Sequence
from ringserve.engine.step_time import StepTimeModel
from ringserve.engine.swap_space import SwapCosts, SwapSpace
from ringserve.messages.columns import pack_i32
from ringserve.messages.steps import PageSwaps


class Swapping:
    """The scheduler's half: who is on the host, and what the next message asks for. A swap space of no pages is never
    used."""

    def __init__(self, space: SwapSpace, costs: SwapCosts, page_size: int, step_times: StepTimeModel) -> None:
        self._space = space
        self._costs = costs
        self._page_size = page_size
        self._step_times = step_times
        self._going_out: dict[Sequence, list[int]] = {}
        """KV pages of those preempted since the last message, in order."""
        self._coming_in: dict[Sequence, tuple[int, list[int]]] = {}
        """Of those resumed since the last message: (index of the first page that comes in, KV pages)."""
        self.pages_out = 0
        self.pages_in = 0
        self.tokens_in = 0
        """Tokens that were not computed again since they came back."""

    @property
    def num_host_pages(self) -> int:
        return self._space.num_pages

    @property
    def num_held(self) -> int:
        """Host pages in use."""
        return self._space.num_pages - self._space.num_free

    def swap_out(self, sequence: Sequence) -> None:
        """A running sequence is preempted and still has its pages: keep them, if that is worth it and there is room."""
        num_tokens = sequence.num_computed_tokens
        if not self._space.num_free or not num_tokens or sequence.num_known_tokens >= sequence.max_total_tokens:
            return  # the last: all that its length allows is being drawn, so it never resumes
        pages = sequence.block_table[: self._pages(num_tokens)]
        recompute = self._step_times.costs.of_row(0, num_tokens)
        if not self._costs.should_swap(len(pages), recompute) or self._space.take(sequence, len(pages)) is None:
            return
        sequence.num_swapped_tokens = num_tokens
        self._going_out[sequence] = pages

    def swap_in(self, sequence: Sequence, num_cached_pages: int) -> None:
        """A sequence has just got its pages; the first ones are the prefix cache's. The others come back from the host,
        as far as they were there."""
        num_tokens = sequence.num_swapped_tokens
        if not num_tokens:
            return
        sequence.num_swapped_tokens = 0
        num_saved = num_tokens - sequence.num_computed_tokens
        if num_saved <= 0:  # the cache has as much
            self._release(sequence)
            return
        self._coming_in[sequence] = num_cached_pages, sequence.block_table[num_cached_pages : self._pages(num_tokens)]
        self.tokens_in += num_saved
        sequence.num_computed_tokens = num_tokens

    def forget(self, sequence: Sequence) -> None:
        """It is over: whatever it has on the host is free."""
        if sequence.num_swapped_tokens:
            sequence.num_swapped_tokens = 0
            self._release(sequence)

    def take(self) -> PageSwaps | None:
        """What the next message asks for."""
        if not self._going_out and not self._coming_in:
            return None
        held = self._space.held
        out_pages = [page for pages in self._going_out.values() for page in pages]
        out_host = [page for sequence in self._going_out for page in held[sequence]]
        in_pages = [page for _, pages in self._coming_in.values() for page in pages]
        in_host = [
            page
            for sequence, (first, pages) in self._coming_in.items()
            for page in held[sequence][first : first + len(pages)]
        ]
        self.pages_out += len(out_pages)
        self.pages_in += len(in_pages)
        for sequence in self._coming_in:
            self._space.release(sequence)
        self._going_out, self._coming_in = {}, {}
        return PageSwaps(pack_i32(out_pages), pack_i32(out_host), pack_i32(in_pages), pack_i32(in_host))

    def _release(self, sequence: Sequence) -> None:
        self._going_out.pop(sequence, None)
        self._space.release(sequence)

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)

    def check_integrity(self, waiting: Iterable[Sequence], running: Iterable[Sequence]) -> list[str]:
        """What is wrong between the sequences and the swap space; empty when sound. Between two calls of the scheduler:
        nothing is coming in then."""
        problems = self._space.check_integrity()
        held = dict(self._space.held)
        for sequence in waiting:
            pages = held.pop(sequence, ())
            if len(pages) != self._pages(sequence.num_swapped_tokens):
                problems.append(f"{sequence} has {sequence.num_swapped_tokens} tokens in {len(pages)} host pages")
            if sequence.num_swapped_tokens >= sequence.num_known_tokens:
                problems.append(f"{sequence} would have nothing to compute after {sequence.num_swapped_tokens} tokens")
        problems += [f"{owner} has host pages and does not wait" for owner in held]
        problems += [f"{sequence} runs and is swapped" for sequence in running if sequence.num_swapped_tokens]
        lost = self._going_out.keys() - self._space.held.keys()
        problems += [f"{sequence} is to go out and has no host pages" for sequence in lost]
        if self._coming_in:
            problems.append(f"{list(self._coming_in)} come in with no message")
        return problems
