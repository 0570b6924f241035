"""Which page holds what: full pages found by their contents, the least recently used ones given up first.

A page's key names everything its keys and values depend on: the tokens in it and, through a chained SHA-256, the salt
and all tokens before it. The page's own tokens are part of the key as they are, so two pages are the same only if their
tokens were compared and are equal, not merely their digests.

A page may be *held* by sequences (any number of them: it is full, so nobody writes to it) or *idle*: no sequence holds
it, its contents stay until the page is needed. Idle pages whose keys somebody wants *kept* are needed last. This module
knows neither sequences nor who holds or keeps what.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

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
        self._kept: OrderedDict[int, None] = OrderedDict()
        """The same for idle pages that are kept: these go when there are no others."""
        self._keepers: Counter[PageKey] = Counter()
        """How often each key was asked to be kept, whether or not a page with it is here."""

    @property
    def num_idle_pages(self) -> int:
        return len(self._idle) + len(self._kept)

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

    def page_of(self, key: PageKey) -> int | None:
        return self._page_of.get(key)

    def is_idle(self, page: int) -> bool:
        return page in self._idle or page in self._kept

    def insert(self, page: int, key: PageKey) -> None:
        """Remember what a held page holds. Where another page holds the same already, that one stays."""
        if page in self._key_of:
            raise ValueError(f"page {page} is full, its contents cannot change")
        if key not in self._page_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def retire(self, page: int) -> bool:
        """Nobody holds the page any more. True if its contents are known: it is idle then, not free."""
        key = self._key_of.get(page)
        if key is None:
            return False
        (self._kept if key in self._keepers else self._idle)[page] = None
        return True

    def revive(self, page: int) -> None:
        """An idle page is held again."""
        del (self._idle if page in self._idle else self._kept)[page]

    def evict(self) -> int:
        """Forget the contents of the idle page that was used least recently, of one that is kept only where there is
        no other; KeyError if none is idle."""
        page, _ = (self._idle or self._kept).popitem(last=False)
        self.forget(page)
        return page

    def forget(self, page: int) -> None:
        """Nothing is known any more of a page that is not idle."""
        del self._page_of[self._key_of.pop(page)]

    def keep(self, keys: Iterable[PageKey]) -> None:
        """Give up the pages with these keys last, until ``let_go`` was called as often."""
        for key in keys:
            self._keepers[key] += 1
            page = self._page_of.get(key)
            if page is not None and page in self._idle:
                del self._idle[page]
                self._kept[page] = None

    def let_go(self, keys: Iterable[PageKey]) -> list[int]:
        """Undo a ``keep``; pages that nobody keeps any more are the first to be given up, the last of them before the
        others. Returns these idle pages."""
        released: list[int] = []
        for key in keys:
            self._keepers[key] -= 1
            if self._keepers[key]:
                continue
            del self._keepers[key]
            page = self._page_of.get(key)
            if page is not None and page in self._kept:
                del self._kept[page]
                self._idle[page] = None
                self._idle.move_to_end(page, last=False)
                released.append(page)
        return released

    def kept_keys(self) -> Counter[PageKey]:
        """What is to be kept, and how often that was said."""
        return self._keepers

    def check_integrity(self) -> list[str]:
        """What is wrong between keys and pages; empty when sound."""
        problems = [
            f"page {page} is cached under a key that leads to page {self._page_of.get(key)}"
            for page, key in self._key_of.items()
            if self._page_of.get(key) != page
        ]
        if len(self._page_of) != len(self._key_of):
            problems.append(f"{len(self._page_of)} keys lead to {len(self._key_of)} cached pages")
        idle = self._idle.keys() | self._kept.keys()
        problems += [f"page {page} is idle and its contents are unknown" for page in idle - self._key_of.keys()]
        problems += [f"page {page} is idle twice" for page in self._idle.keys() & self._kept.keys()]
        problems += [
            f"idle page {page} is {'' if page in self._kept else 'not '}kept, its key is{'' if is_kept else ' not'}"
            for page in idle & self._key_of.keys()
            if (page in self._kept) != (is_kept := self._key_of[page] in self._keepers)
        ]
        return problems
