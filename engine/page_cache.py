"""Which page holds what: full pages found by their contents, the least recently used ones given up first.

A page's key names everything its keys and values depend on: the tokens in it and, through a chained SHA-256, the salt
and all tokens before it. The page's own tokens are part of the key as they are, so two pages are the same only if their
tokens were compared and are equal, not merely their digests.

A page may be *held* by sequences (any number of them: it is full, so nobody writes to it) or *idle*: no sequence holds
it, its contents stay until the page is needed. This module knows neither sequences nor who holds what.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

PageKey = tuple[bytes, bytes]
"""(digest of the salt and everything before the page, the page's token ids as int32)."""


def first_digest(salt: str) -> bytes:
    """What stands before the first page. Requests with different salts share nothing."""
    return hashlib.sha256(b"salt:" + salt.encode()).digest()


def digest_after(key: PageKey) -> bytes:
    """What stands before the page that follows the one with this key."""
    return hashlib.sha256(key[0] + key[1]).digest()


class PageCache:
    """Contents of full pages, and the idle pages in the order of their last use."""

    def __init__(self) -> None:
        self._page_of: dict[PageKey, int] = {}
        self._key_of: dict[int, PageKey] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Least recently used first."""

    @property
    def num_idle_pages(self) -> int:
        return len(self._idle)

    def find(self, keys: Sequence[PageKey]) -> list[int]:
        """The pages of the longest run of ``keys``, from the first one on, that is here."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def key_of(self, page: int) -> PageKey | None:
        return self._key_of.get(page)

    def is_idle(self, page: int) -> bool:
        return page in self._idle

    def insert(self, page: int, key: PageKey) -> None:
        """Remember what a held page holds. Where another page holds the same already, that one stays."""
        if page in self._key_of:
            raise ValueError(f"page {page} is full, its contents cannot change")
        if key not in self._page_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def retire(self, page: int) -> bool:
        """Nobody holds the page any more. True if its contents are known: it is idle then, not free."""
        if page not in self._key_of:
            return False
        self._idle[page] = None
        return True

    def revive(self, page: int) -> None:
        """An idle page is held again."""
        del self._idle[page]

    def evict(self) -> int:
        """Forget the contents of the idle page that was used least recently; KeyError if none is idle."""
        page, _ = self._idle.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        return page

    def check_integrity(self) -> list[str]:
        """What is wrong between keys and pages; empty when sound."""
        problems = [
            f"page {page} is cached under a key that leads to page {self._page_of.get(key)}"
            for page, key in self._key_of.items()
            if self._page_of.get(key) != page
        ]
        if len(self._page_of) != len(self._key_of):
            problems.append(f"{len(self._page_of)} keys lead to {len(self._key_of)} cached pages")
        problems += [f"page {page} is idle and its contents are unknown" for page in self._idle.keys() - self._key_of]
        return problems
