"""The page allocator."""

from __future__ import annotations

import random

import pytest

from ringserve.engine.kv_manager import KVManager
from ringserve.engine.page_cache import PageKey, digest_after, first_digest


def test_page_zero_is_never_given_out() -> None:
    manager = KVManager(num_pages=5, page_size=16)
    table: list[int] = []
    assert manager.grow(table, 5 * 16) == [1, 2, 3, 4, 5]
    assert table == [1, 2, 3, 4, 5]
    assert manager.num_free_pages == 0
    assert manager.check_integrity([table]) == []


@pytest.mark.parametrize("page_size", [16, 64])
def test_a_table_grows_only_at_page_boundaries(page_size: int) -> None:
    manager = KVManager(num_pages=3, page_size=page_size)
    table: list[int] = []
    assert manager.grow(table, 1) == [1]
    assert manager.grow(table, page_size) == []
    assert manager.grow(table, page_size + 1) == [2]
    assert manager.capacity == 3 * page_size


def test_nothing_changes_where_too_few_pages_are_free() -> None:
    manager = KVManager(num_pages=3, page_size=16)
    table: list[int] = []
    manager.grow(table, 16)
    assert manager.grow(table, 16 * 4) is None
    assert table == [1]
    assert manager.num_free_pages == 2


def test_a_shared_page_comes_back_with_its_last_reference() -> None:
    manager = KVManager(num_pages=2, page_size=16)
    first: list[int] = []
    manager.grow(first, 20)
    second = first[:1]
    manager.share(second)
    assert manager.check_integrity([first, second]) == []
    manager.release(first)
    assert manager.num_free_pages == 1
    assert manager.check_integrity([second]) == []
    manager.release(second)
    assert manager.num_free_pages == 2
    assert manager.check_integrity([]) == []


def test_idle_pages_are_found_until_they_are_needed() -> None:
    manager = KVManager(num_pages=3, page_size=16)
    keys: list[PageKey] = [(b"before", b"first"), (b"first", b"second")]
    table: list[int] = []
    manager.grow(table, 40)
    for page, key in zip(table, keys, strict=False):
        manager.remember(page, key)
    with pytest.raises(ValueError, match="contents cannot change"):
        manager.remember(1, (b"", b"other"))
    manager.release(table)
    assert manager.num_free_pages == 3
    assert manager.find(keys) == [1, 2]
    assert manager.find([(b"other", b"first"), keys[1]]) == []
    manager.grow(table, 32)  # the free page, then the last of the idle ones
    assert table == [3, 2]
    found = manager.find(keys)
    assert found == [1]
    assert manager.num_idle(found) == 1
    manager.share(found)
    assert manager.num_idle(found) == manager.num_free_pages == 0
    assert manager.check_integrity([table, found]) == []
    assert manager.grow(table, 33) is None


def test_the_first_page_with_given_contents_stays() -> None:
    manager = KVManager(num_pages=2, page_size=16)
    table: list[int] = []
    manager.grow(table, 32)
    for page in table:
        manager.remember(page, (b"", b"same"))
    manager.release(table)
    assert manager.find([(b"", b"same")]) == [1]
    assert manager.check_integrity([]) == []
    assert manager.grow(table, 16) == [2]


def test_misuse_is_an_error() -> None:
    manager = KVManager(num_pages=2, page_size=16)
    table: list[int] = []
    manager.grow(table, 1)
    stale = list(table)
    manager.release(table)
    with pytest.raises(ValueError, match="page 1 is released more often"):
        manager.release(stale)
    with pytest.raises(ValueError, match="page 0"):
        manager.release([0])
    with pytest.raises(ValueError, match="page 2 is free"):
        manager.share([2])
    with pytest.raises(ValueError, match="page 2 is free"):
        manager.remember(2, (b"", b""))
    with pytest.raises(ValueError, match="needs pages"):
        KVManager(0, 16)


def test_integrity_finds_what_is_wrong() -> None:
    manager = KVManager(num_pages=4, page_size=16)
    table: list[int] = []
    manager.grow(table, 32)
    assert any("page 1 has 1 references and is held 0 times" in p for p in manager.check_integrity([]))
    assert any("held 2 times" in p for p in manager.check_integrity([table, table]))
    assert any("holds a page twice" in p for p in manager.check_integrity([[1, 1], [2]]))
    assert any("may never be given out" in p for p in manager.check_integrity([table, [0]]))


def test_random_operations_keep_the_books() -> None:
    rng = random.Random(7)
    manager = KVManager(num_pages=23, page_size=16)
    tables: list[list[int]] = []
    for number in range(3000):
        match rng.randrange(6):
            case 4 if tables:
                fresh = [page for page in rng.choice(tables) if manager.key_of(page) is None]
                if fresh:
                    manager.remember(fresh[0], (b"", b"%d" % number))
            case 5:
                found = manager.find([(b"", b"%d" % rng.randrange(max(0, number - 60), number + 1))])
                if found:
                    manager.share(found)
                    tables.append(found)
            case 0:
                table: list[int] = []
                if manager.grow(table, rng.randrange(1, 100)) is not None:
                    tables.append(table)
            case 1 if tables:
                table = rng.choice(tables)
                manager.grow(table, 16 * len(table) + rng.randrange(40))
            case 2 if tables:
                table = rng.choice(tables)
                prefix = table[: rng.randrange(len(table) + 1)]
                manager.share(prefix)
                tables.append(prefix)
            case 3 if tables:
                manager.release(tables.pop(rng.randrange(len(tables))))
        assert manager.check_integrity(tables) == []
    for table in tables:
        manager.release(table)
    assert manager.num_free_pages == 23


def test_a_key_depends_on_all_that_is_before_it() -> None:
    first = (first_digest("salt"), b"page")
    assert first_digest("salt") != first_digest("")
    assert digest_after(first) != digest_after((first_digest(""), b"page"))
    assert digest_after(first) != digest_after((first_digest("salt"), b"gape"))
    assert digest_after(first) == digest_after((first_digest("salt"), b"page"))
