"""Sequences that begin alike share the pages of what they have in common.

A running sequence's pages become known to the cache as soon as a step that fills them has been planned: steps run in
order, so whoever is planned later finds them written. Within one step there is no order, hence a sequence whose next
page is just being computed by a running one waits for it instead of computing the same again (``lookup`` says None):
that is how the choices of a request come to share its prompt.

Only full pages are shared. Nobody writes to a full page, so nothing is ever copied; what lies behind the last shared
page (less than a page of a common prompt) is computed by each sequence itself, and at least the last token always is,
since its logits are wanted.
"""

from __future__ import annotations

from collections.abc import Iterable

from ringserve.engine.kv_manager import KVManager
from ringserve.engine.page_cache import PageKey, digest_after, first_digest
from ringserve.engine.sequence import Sequence
from ringserve.engine.sessions import Sessions


class PrefixSharing:
    """The prefix cache as the scheduler uses it; with ``enabled`` false nothing is ever found."""

    def __init__(self, kv: KVManager, enabled: bool, sessions: Sessions) -> None:
        self._kv = kv
        self._sessions = sessions
        self.enabled = enabled
        self._computing: dict[PageKey, Sequence] = {}
        """Pages of prompts that running sequences have yet to compute, with the one that does."""
        self.num_queries = 0
        """Prompt tokens looked up."""
        self.num_hits = 0

    def lookup(self, sequence: Sequence) -> list[int] | None:
        """Cached pages that ``sequence`` may start with; None while the next one is just being computed (unless the
        host has it).

        ``num_cached`` says how many tokens they hold: the last one may be its session's and not full.
        """
        sequence.num_tail_tokens = 0
        if not self.enabled or sequence.sampling.prompt_logprobs >= 0:  # those need the logits of every token
            return []
        self._extend_keys(sequence)
        # The last known token is computed anyway: the next token is drawn from its logits.
        keys = sequence.page_keys[: (sequence.num_known_tokens - 1) // self._kv.page_size]
        pages = self._kv.find(keys)
        num_swapped = sequence.num_swapped_tokens
        if len(pages) < len(keys) and keys[len(pages)] in self._computing:
            if num_swapped < (len(pages) + 1) * self._kv.page_size:
                return None
            return pages
        if sequence.request.session is None or num_swapped:  # what is on the host ends in a page of its own
            return pages
        if (tail := self._sessions.tail(sequence, len(pages))) is not None:
            page, sequence.num_tail_tokens = tail
            pages.append(page)
        return pages

    def num_cached(self, sequence: Sequence, pages: list[int]) -> int:
        """Tokens in the pages that ``lookup`` has just found for ``sequence``."""
        tail = sequence.num_tail_tokens
        return (len(pages) - 1) * self._kv.page_size + tail if tail else len(pages) * self._kv.page_size

    def start(self, sequence: Sequence, pages: list[int]) -> None:
        """``sequence`` starts to run with these pages, which ``lookup`` found for it and which it holds by now."""
        num_tokens = self.num_cached(sequence, pages)
        num_full = len(pages)
        if sequence.num_tail_tokens:
            num_full -= 1
            self._kv.take_over(pages[-1])
        sequence.num_computed_tokens = num_tokens
        sequence.num_registered_pages = num_full
        if not self.enabled:
            return
        num_prompt_tokens = sequence.request.num_prompt_tokens
        if not sequence.first_scheduled_ns and sequence.sampling.prompt_logprobs < 0:
            sequence.num_cached_tokens = min(num_tokens, num_prompt_tokens)
            self.num_queries += num_prompt_tokens
            self.num_hits += sequence.num_cached_tokens
        self._extend_keys(sequence)
        for key in sequence.page_keys[num_full:]:
            self._computing.setdefault(key, sequence)

    def register(self, sequence: Sequence) -> None:
        """Offer what ``sequence`` has filled, counting steps planned, to whoever comes next."""
        # A token that a step in flight draws lies in a page already, but nobody here knows which one it is.
        num_tokens = min(
            sequence.num_computed_tokens, sequence.request.num_prompt_tokens + len(sequence.output_token_ids)
        )
        first, end = sequence.num_registered_pages, num_tokens // self._kv.page_size
        if first >= end or not self.enabled:
            return
        keys = sequence.page_keys
        if len(keys) < end:
            self._extend_keys(sequence)
        remember, computing = self._kv.remember, self._computing
        for index in range(first, end):
            key = keys[index]
            remember(sequence.block_table[index], key)
            if computing and computing.get(key) is sequence:
                del computing[key]
        sequence.num_registered_pages = end

    def end_of_turn(self, sequence: Sequence) -> None:
        """A running sequence is over, and well: its session, if it has one, keeps its pages."""
        if sequence.request.session is not None:
            self.register(sequence)
            self._sessions.keep(sequence)

    def leave(self, sequence: Sequence) -> None:
        """``sequence`` is about to give its pages back; whoever waits for one must compute it."""
        for key in sequence.page_keys[sequence.num_registered_pages :]:
            self._forget_computing(key, sequence)
        sequence.num_registered_pages = 0

    def _forget_computing(self, key: PageKey, sequence: Sequence) -> None:
        if self._computing.get(key) is sequence:
            del self._computing[key]

    def _extend_keys(self, sequence: Sequence) -> None:
        """Name the full pages of all tokens known by value; the prompt's once for all choices."""
        size, keys = self._kv.page_size, sequence.page_keys
        request = sequence.request
        if not keys:
            keys += request.prompt_page_keys
        start = len(keys) * size
        last = request.num_prompt_tokens + len(sequence.output_token_ids) - size
        while start <= last:
            digest = digest_after(keys[-1]) if keys else first_digest(request.cache_salt)
            keys.append((digest, sequence.token_bytes(start, start + size)))
            start += size
        if not request.prompt_page_keys:
            request.prompt_page_keys = keys[: request.num_prompt_tokens // size]

    def check_integrity(self, running: Iterable[Sequence]) -> list[str]:
        """What is wrong between the sequences' keys and the cache; empty when sound."""
        problems = []
        live = set()
        for sequence in running:
            live.add(sequence)
            for index, page in enumerate(sequence.block_table):
                key = self._kv.key_of(page)
                if key is None:
                    continue
                if index >= sequence.num_registered_pages:
                    problems.append(f"page {page} of {sequence} is cached before it is full")
                elif key != sequence.page_keys[index]:
                    problems.append(f"page {page} of {sequence} is cached under another page's key")
        problems += [
            f"{sequence} is waited for and does not run"
            for sequence in self._computing.values()
            if sequence not in live
        ]
        return problems
