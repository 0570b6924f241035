"""Which page of the KV pool belongs to whom: the scheduler's half of the pool (the executor owns the memory).

Pages are numbered ``1 .. num_pages``; page 0 is never given out, so that padded block tables point at a page nobody
reads. A block table is a plain list of page ids owned by its sequence; page ``i`` of it holds the keys and values of
the tokens ``[i * page_size, (i + 1) * page_size)``. Pages are reference counted: several tables may hold the same full
page. With its last reference a page returns to the free list or, where its contents are known (``page_cache.py``),
becomes idle: it counts as free, is given out when the free list is empty, and until then can be found again.

Steps run in the executor in the order they were planned, so a freed page may be given out at once: whoever reads it
in a step still in flight does so before the new owner writes.

This module knows neither requests nor time.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

from ringserve.engine.page_cache import PageCache, PageKey


class KVManager:
    """A page allocator that can prove itself (``check_integrity``)."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a KV pool needs pages: {num_pages} pages of {page_size} tokens")
        self.num_pages = num_pages
        self.page_size = page_size
        # A stack: the pages freed last are still warm in the cache. Ascending at first.
        self._free = list(range(num_pages, 0, -1))
        self._references = array("i", bytes(4 * (num_pages + 1)))
        self._cache = PageCache()

    @property
    def num_free_pages(self) -> int:
        """Pages that nobody holds, idle ones among them."""
        return len(self._free) + self._cache.num_idle_pages

    @property
    def capacity(self) -> int:
        """Tokens that all pages together hold."""
        return self.num_pages * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` tokens take."""
        return -(-num_tokens // self.page_size)

    def grow(self, table: list[int], num_tokens: int) -> list[int] | None:
        """Append pages to ``table`` until it holds ``num_tokens`` tokens.

        Returns the new pages (none if it held them already), or None, with nothing changed, where too few are free.
        """
        missing = self.pages_for(num_tokens) - len(table)
        if missing <= 0:
            return []
        if missing > self.num_free_pages:
            return None
        pages = self._free[: -missing - 1 : -1]
        del self._free[-missing:]
        pages += [self._cache.evict() for _ in range(missing - len(pages))]
        for page in pages:
            self._references[page] = 1
        table.extend(pages)
        return pages

    def grow_by_one(self, table: list[int]) -> list[int] | None:
        """Append one page to ``table``; as ``grow``, for the many that only ever need one more."""
        if self._free:
            page = self._free.pop()
        elif self._cache.num_idle_pages:
            page = self._cache.evict()
        else:
            return None
        self._references[page] = 1
        table.append(page)
        return [page]

    def find(self, keys: Sequence[PageKey]) -> list[int]:
        """The pages, held or idle, that hold the longest run of ``keys`` from the first one on."""
        return self._cache.find(keys)

    def num_idle(self, pages: Iterable[int]) -> int:
        """How many of these pages count as free."""
        return sum(self._cache.is_idle(page) for page in pages)

    def num_freed(self, tables: Iterable[Sequence[int]], wanted: Iterable[int]) -> int:
        """How many pages would become free if these tables were released, ``wanted`` ones not counted."""
        held = Counter(page for table in tables for page in table)
        for page in wanted:
            held.pop(page, None)
        return sum(self._references[page] == count for page, count in held.items())

    def share(self, pages: Iterable[int]) -> None:
        """One more table holds these pages, which others hold or which are idle."""
        for page in pages:
            if self._references[page] == 0:
                if not self._cache.is_idle(page):
                    raise ValueError(f"page {page} is free and cannot be shared")
                self._cache.revive(page)
            self._references[page] += 1

    def remember(self, page: int, key: PageKey) -> None:
        """A held page is full; ``key`` names its contents from now on, unless another page has the same."""
        if self._references[page] < 1:
            raise ValueError(f"page {page} is free and cannot be remembered")
        self._cache.insert(page, key)

    def key_of(self, page: int) -> PageKey | None:
        """What a page holds, where that is known."""
        return self._cache.key_of(page)

    def page_of(self, key: PageKey) -> int | None:
        """The page with these contents, held or idle."""
        return self._cache.page_of(key)

    def take_over(self, page: int) -> None:
        """The one table that holds a page goes on writing in it: its contents are no longer what was remembered."""
        if self._references[page] != 1:
            raise ValueError(f"page {page} has {self._references[page]} holders, not one who may write")
        self._cache.forget(page)

    def keep(self, keys: Iterable[PageKey]) -> None:
        """Idle pages with these keys are given out last, until ``let_go``."""
        self._cache.keep(keys)

    def let_go(self, keys: Iterable[PageKey]) -> None:
        """Undo a ``keep``. Pages that are not full can be of no use to anybody else and are free at once."""
        for page in self._cache.let_go(keys):
            key = self._cache.key_of(page)
            if key is not None and len(key[1]) < 4 * self.page_size:
                self._cache.revive(page)
                self._cache.forget(page)
                self._free.append(page)

    @property
    def num_kept(self) -> int:
        """Different keys that are to be kept, whether or not a page with them is here."""
        return len(self._cache.kept_keys())

    def kept_keys(self) -> Counter[PageKey]:
        """What is to be kept, and how often that was said."""
        return self._cache.kept_keys()

    def release(self, table: list[int]) -> None:
        """Give back every page of ``table`` and empty it. Of idle pages, those at the table's end are given up first:
        a page is of no use without those before it."""
        for page in reversed(table):
            references = self._references[page] - 1
            if page == 0 or references < 0:
                raise ValueError(f"page {page} is released more often than it was given out")
            self._references[page] = references
            if references == 0 and not self._cache.retire(page):
                self._free.append(page)
        table.clear()

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> list[str]:
        """What is wrong, given every block table there is; empty when sound."""
        problems = self._cache.check_integrity()
        held: Counter[int] = Counter()
        for table in tables:
            if len(set(table)) != len(table):
                problems.append(f"a block table holds a page twice: {list(table)}")
            held.update(table)
        free = Counter(self._free)
        for page, count in free.items():
            if count > 1:
                problems.append(f"page {page} is in the free list {count} times")
            if not 1 <= page <= self.num_pages:
                problems.append(f"page {page} is free but does not exist")
        for page in held:
            if not 1 <= page <= self.num_pages:
                problems.append(f"page {page} is in a block table but may never be given out")
        for page in range(1, self.num_pages + 1):
            references = self._references[page]
            if references != held[page]:
                problems.append(f"page {page} has {references} references and is held {held[page]} times")
            if (references == 0) != (page in free or self._cache.is_idle(page)):
                problems.append(f"page {page} has {references} references and is {'' if page in free else 'not '}free")
            if page in free and self._cache.key_of(page) is not None:
                problems.append(f"page {page} is free and cached")
        return problems
