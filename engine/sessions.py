"""Sessions: conversations whose pages are kept for their next turn.

When a request with a session ends, the pages of its prompt and answer stay in the prefix cache *kept*: idle pages that
are given up only after all others. They are free pages all the same, so whoever runs gets them before anybody is
preempted. A session also keeps its last page, which is not full: a next turn that begins with all that the session has
takes that page over and goes on writing in it, so that nothing but new tokens is computed. Only the session itself can;
full pages are shared as ever.

Sessions end after a time without use, when they are dropped, and, least recently used first, where all together keep
more than their share of the pool. What they kept is then idle like any other page, and first to go.

A session belongs to an owner (whose key the request came with) and is invisible to others. Time is an argument.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from ringserve.config import SchedulerConfig
from ringserve.engine.kv_manager import KVManager
from ringserve.engine.page_cache import PageKey, digest_after, first_digest
from ringserve.engine.sequence import Sequence
from ringserve.messages.sessions import SessionInfo, SessionRef


@dataclass(slots=True)
class Session:
    """What is kept of one conversation."""

    created_ns: int
    used_ns: int
    keys: list[PageKey] = field(default_factory=list)
    """Of its pages from the first token on; the last one may be of a page that is not full."""


class Sessions:
    """All sessions, the least recently used first."""

    def __init__(self, kv: KVManager, config: SchedulerConfig) -> None:
        self._kv = kv
        self._ttl_ns = int(config.session_ttl * 1e9)
        enabled = config.enable_prefix_caching and self._ttl_ns > 0
        self._max_pages = int(config.session_pool_share * kv.num_pages) if enabled else 0
        self._sessions: OrderedDict[SessionRef, Session] = OrderedDict()
        self._now_ns = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def tail(self, sequence: Sequence, num_full_pages: int) -> tuple[int, int] | None:
        """(page, tokens in it): the session's last page, where it goes on after this many full pages that the sequence
        has found, holds nothing but the sequence's next tokens, and leaves at least one to compute."""
        ref = sequence.request.session
        session = self._sessions.get(ref) if ref is not None else None
        if session is None or len(session.keys) != num_full_pages + 1:
            return None
        key = session.keys[-1]
        start, num_tokens = num_full_pages * self._kv.page_size, len(key[1]) // 4
        if num_tokens == self._kv.page_size or start + num_tokens >= sequence.num_known_tokens:
            return None
        keys = sequence.page_keys
        before = digest_after(keys[num_full_pages - 1]) if num_full_pages else _first(sequence)
        if key != (before, sequence.token_bytes(start, start + num_tokens)):
            return None
        page = self._kv.page_of(key)
        return None if page is None else (page, num_tokens)

    def set_time(self, now_ns: int) -> None:
        """It is now so late, for everything until the next call; ends what nobody has used for long enough."""
        self._now_ns = now_ns
        while self._sessions:
            ref = next(iter(self._sessions))
            if now_ns - self._sessions[ref].used_ns < self._ttl_ns:
                return
            self._end(ref)

    def keep(self, sequence: Sequence) -> None:
        """A running sequence of a session is over and about to give its pages back, the full ones registered."""
        ref = sequence.request.session
        if ref is None or not self._max_pages:
            return
        keys = sequence.page_keys[: sequence.num_registered_pages]
        tail = self._tail_key(sequence)
        if tail is not None and len(keys) < self._max_pages:
            index = len(keys)
            if self._kv.page_of(tail) is None:
                self._kv.remember(sequence.block_table[index], tail)
            keys.append(tail)
        keys = keys[: self._max_pages]
        if not keys:
            return
        session = self._sessions.get(ref)
        if session is None:
            session = self._sessions[ref] = Session(self._now_ns, self._now_ns)
        before, session.keys = session.keys, keys
        self._kv.keep(keys)
        self._kv.let_go(before)
        session.used_ns = self._now_ns
        self._sessions.move_to_end(ref)
        # Pages that several sessions keep count once; hence a bound of its own on their number.
        while self._kv.num_kept > self._max_pages or len(self._sessions) > self._max_pages:
            self._end(next(iter(self._sessions)))

    def touch(self, ref: SessionRef) -> None:
        """A request of the session has come."""
        session = self._sessions.get(ref)
        if session is not None:
            session.used_ns = self._now_ns
            self._sessions.move_to_end(ref)

    def drop(self, ref: SessionRef) -> bool:
        """End one; False if there is none."""
        if ref not in self._sessions:
            return False
        self._end(ref)
        return True

    def of_owner(self, owner: str) -> tuple[SessionInfo, ...]:
        """An owner's sessions, the least recently used first."""
        return tuple(
            self._info(ref.session_id, session) for ref, session in self._sessions.items() if ref.owner == owner
        )

    def _info(self, session_id: str, session: Session) -> SessionInfo:
        pages = self._kv.find(session.keys)  # what pressure has taken from the middle makes the rest useless
        return SessionInfo(
            session_id=session_id,
            num_tokens=sum(len(key[1]) // 4 for key in session.keys[: len(pages)]),
            num_pages=len(pages),
            age_ns=self._now_ns - session.created_ns,
            idle_ns=self._now_ns - session.used_ns,
            expires_in_ns=max(0, session.used_ns + self._ttl_ns - self._now_ns),
        )

    def _tail_key(self, sequence: Sequence) -> PageKey | None:
        """Names what lies in the page behind the full ones; None if nothing does."""
        size, num_full = self._kv.page_size, sequence.num_registered_pages
        num_by_value = sequence.request.num_prompt_tokens + len(sequence.output_token_ids)
        stop = min(sequence.num_computed_tokens, num_by_value)
        if stop <= num_full * size:
            return None
        before = digest_after(sequence.page_keys[num_full - 1]) if num_full else _first(sequence)
        return before, sequence.token_bytes(num_full * size, stop)

    def _end(self, ref: SessionRef) -> None:
        self._kv.let_go(self._sessions.pop(ref).keys)

    def check_integrity(self) -> list[str]:
        """What is wrong between sessions and kept pages; empty when sound."""
        problems = []
        held = Counter(key for session in self._sessions.values() for key in session.keys)
        if len(held) > self._max_pages or len(self._sessions) > self._max_pages:
            problems.append(f"{len(self._sessions)} sessions keep {len(held)} pages, {self._max_pages} may be")
        if self._kv.kept_keys() != held:
            problems.append("the cache keeps other pages than the sessions")
        used = [session.used_ns for session in self._sessions.values()]
        if used != sorted(used):
            problems.append("sessions are out of order")
        return problems


def _first(sequence: Sequence) -> bytes:
    return first_digest(sequence.request.cache_salt)
