"""PagePool rule by rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from invariants import check_pool

from kvquant.errors import OutOfPagesError
from kvquant.paged.pool import Growth, PagePool, Prefix


class KnownPool(PagePool):
    """A pool of sequences with known tokens, published as soon as they are written."""

    def __init__(self, num_pages: int, page_size: int, **options: Any) -> None:
        super().__init__(num_pages, page_size, **options)
        self.known: dict[Any, list[int]] = {}

    def write(self, name: str, count: int, tokens: Sequence[int] | None = None) -> Growth:
        length = self.length(name)
        growth = self.append([name], [count])
        known = self.known.setdefault(name, [])
        del known[length + self.root_len :]
        if tokens is not None and len(known) in (0, length + self.root_len):
            known += tokens
        self.insert(name, known)
        check_pool(self)
        return growth

    def begin(self, name: str, tokens: Sequence[int]) -> int:
        """Allocate a sequence and append what is not there; return what was."""
        present, _ = self.allocate(name, tokens)
        self.append([name], [len(tokens) - self.root_len - present])
        self.known[name] = list(tokens)
        self.insert(name, tokens)
        check_pool(self)
        return present


def grown(num_pages: int, page_size: int, **sequences: Sequence[int]) -> KnownPool:
    """A pool with sequences of known tokens."""
    pool = KnownPool(num_pages, page_size)
    for name, tokens in sequences.items():
        pool.begin(name, tokens)
    return pool


def seen(pool: PagePool, ids: str) -> object:
    tables = [(pool.block_table(i), pool.length(i)) for i in ids]
    return tables, pool.num_free, len(pool._cached)


def test_append_takes_pages_as_needed() -> None:
    pool = PagePool(4, 4)
    assert pool.allocate("a") == Prefix(0, None)
    assert pool.append(["a"], [0]) == Growth([], [])
    assert [len(pool.append(["a"], [n]).entries) for n in (1, 3, 1, 4)] == [1, 0, 1, 1]
    assert pool.length("a") == 9
    assert len(set(pool.block_table("a"))) == 3
    assert pool.num_free == 1


def test_of_two_forks_the_first_to_write_copies_and_the_other_keeps_the_page() -> None:
    pool = grown(4, 4, a=range(6))
    pool.fork("a", "b")
    first, last = pool.block_table("a")
    assert pool.block_table("b") == (first, last)
    growth = pool.append(["b"], [1])
    [(source, target)] = growth.copies
    assert source == last
    assert growth.entries == [(0, 1, target)]
    assert pool.block_table("b") == (first, target)
    assert pool.append(["a"], [1]) == Growth([], [])
    assert pool.block_table("a") == (first, last)


def test_a_full_last_page_is_not_copied() -> None:
    pool = grown(4, 4, a=range(4))
    pool.fork("a", "b")
    assert pool.append(["b"], [1]).copies == []
    assert pool.block_table("b")[0] == pool.block_table("a")[0]


@pytest.mark.parametrize("num_pages, fits", [(4, False), (5, True)])
def test_can_append_counts_the_copies_of_shared_pages(num_pages: int, fits: bool) -> None:
    pool = grown(num_pages, 4, a=range(5))
    pool.fork("a", "b")
    pool.fork("a", "c")
    assert pool.can_append("ab", [1, 1])
    assert pool.can_append("abc", [3, 3, 3]) is (num_pages >= 4)
    assert pool.can_append("abc", [0, 0, 0])
    pool.allocate("d")
    assert pool.can_append("abcd", [1, 1, 1, 1]) is fits


def test_out_of_pages_changes_nothing() -> None:
    pool = grown(3, 2, a=[1, 2, 3])
    pool.fork("a", "b")
    before = seen(pool, "ab")
    with pytest.raises(OutOfPagesError, match=r"'a', 'b' need 2 more pages for 4 tokens, but 1 of"):
        pool.append("ab", [1, 3])
    assert seen(pool, "ab") == before
    assert pool.match_prefix([1, 2, 3, 4]) == 2


def test_a_prefix_is_shared_in_whole_pages() -> None:
    pool = grown(8, 4, a=range(10))
    assert pool.match_prefix(range(20)) == 8
    assert pool.match_prefix(range(7)) == 4
    assert pool.match_prefix([0, 1, 2, 9]) == 0
    assert pool.allocate("b", range(9)).length == pool.length("b") == 8
    assert pool.block_table("b") == pool.block_table("a")[:2]


def test_tokens_after_other_tokens_do_not_match() -> None:
    pool = grown(8, 2, a=[1, 2, 3, 4], b=[5, 6])
    assert pool.match_prefix([5, 6, 3, 4]) == 2
    assert pool.match_prefix([3, 4]) == 0


def test_tokens_of_the_same_hash_do_not_match() -> None:
    assert hash((-1, -1)) == hash((-2, -2))
    pool = grown(4, 2, a=[-1, -1, -1, -1])
    assert pool.match_prefix([-2, -2, -1, -1]) == 0
    assert pool.match_prefix([-1, -1, -2, -2]) == 2


def test_pages_of_ended_sequences_are_found_until_they_are_needed() -> None:
    pool = grown(4, 2, a=[1, 2, 3, 4])
    table = pool.block_table("a")
    pool.free("a")
    assert (pool.num_free, len(pool._cached)) == (4, 2)
    assert pool.begin("b", [1, 2, 3, 4, 5]) == 4
    assert pool.block_table("b")[:2] == table
    assert (pool.num_free, len(pool._cached)) == (1, 0)


def test_the_least_recently_used_pages_go_first_and_the_last_of_a_prefix() -> None:
    pool = grown(6, 2, a=[1, 2, 3, 4], b=[5, 6, 7, 8])
    pool.free("a")
    pool.free("b")
    pool.allocate("a", [1, 2, 3, 4])
    pool.free("a")  # used after b
    pool.allocate("c")
    matches = []
    for _ in range(6):
        pool.write("c", 2)
        matches.append([pool.match_prefix(t) for t in ([1, 2, 3, 4], [5, 6, 7, 8])])
    assert matches == [[4, 4], [4, 4], [4, 2], [4, 0], [2, 0], [0, 0]]


def test_pages_after_unknown_tokens_have_no_names_until_these_are_cut() -> None:
    pool = grown(8, 2, a=[1, 2, 3])
    pool.write("a", 2)
    pool.write("a", 3, [6, 7, 8])
    assert pool.match_prefix([1, 2, 3]) == 2
    pool.truncate("a", 3)
    pool.write("a", 3, [4, 5, 6])
    assert pool.match_prefix(range(1, 9)) == 6


def test_a_cut_page_keeps_its_name_until_it_is_written() -> None:
    pool = grown(4, 4, a=range(12))
    pool.truncate("a", 6)
    assert pool.match_prefix(range(12)) == 12
    assert len(pool._cached) == 1
    assert pool.write("a", 2, [0, 0]) == Growth([], [])
    assert pool.match_prefix(range(12)) == 4
    assert pool.match_prefix([0, 1, 2, 3, 4, 5, 0, 0]) == 8
    assert len(pool._cached) == 0  # no name leads to the page behind
    check_pool(pool)


def test_a_cut_page_that_another_sequence_found_is_copied() -> None:
    pool = grown(4, 4, a=range(8))
    pool.truncate("a", 6)
    pool.allocate("b", range(8))
    assert len(pool.write("a", 1, [9]).copies) == 1
    assert pool.match_prefix(range(8)) == 8


def test_of_pages_with_the_same_tokens_one_stays_cached() -> None:
    pool = KnownPool(6, 2)
    for name in "abc":
        pool.allocate(name)
    for name in "ab":
        pool.write(name, 4, [1, 2, 3, 4])
    pool.free("a")
    assert (len(pool._cached), pool.match_prefix([1, 2, 3, 4])) == (0, 4)
    pool.free("b")
    assert len(pool._cached) == 2
    pool.write("c", 4, [1, 2, 3, 4])
    assert (len(pool._cached), pool.match_prefix([1, 2, 3, 4])) == (0, 4)
    check_pool(pool)


def test_pages_are_found_only_when_they_are_published() -> None:
    pool = KnownPool(6, 2)
    pool.allocate("a")
    pool.append(["a"], [5])
    assert pool.match_prefix(range(5)) == 0
    pool.insert("a", range(3))
    assert pool.match_prefix(range(5)) == 2
    pool.insert("a", range(9))
    assert pool.match_prefix(range(9)) == 4
    check_pool(pool)


def test_names_begin_with_the_head() -> None:
    pool = KnownPool(8, 2, root_len=3, num_roots=2)
    assert pool.begin("a", [1, 2, 3, 5, 6, 7]) == 0
    assert pool.length("a") == 3
    assert pool.match_prefix([1, 2, 3, 5, 6]) == 2
    assert pool.match_prefix([1, 2, 4, 5, 6]) == pool.match_prefix([1, 2]) == 0
    assert pool.allocate("b", [1, 2, 3, 5, 6]) == Prefix(2, 0)
    check_pool(pool)


def test_publish_tells_the_place_of_a_head_that_is_new() -> None:
    pool = PagePool(8, 2, root_len=1, num_roots=2)
    for name, tokens, place in (("a", [1, 5, 6], 0), ("b", [2, 5, 6], 1), ("c", [1, 5, 6], None)):
        pool.allocate(name)
        pool.append([name], [2])
        assert pool.insert(name, tokens) == place


def test_of_the_heads_that_nobody_uses_the_least_recently_used_is_given_up() -> None:
    pool = KnownPool(8, 1, root_len=1, num_roots=2)
    for head in (1, 2):
        pool.begin("a", [head, 7, 8])
        pool.free("a")
    pool.allocate("b", [1, 7])
    pool.begin("c", [3, 9])
    check_pool(pool)
    assert [pool.match_prefix([head, 7, 8]) for head in (1, 2)] == [2, 0]
    assert len(pool._cached) == 1
    pool.begin("d", [4, 9])  # all roots are in use: nothing enters the tree
    assert pool.match_prefix([4, 9]) == 0
    pool.free("b")
    pool.write("d", 1, [10])
    assert [pool.match_prefix(tokens) for tokens in ([1, 7], [4, 9, 10])] == [0, 2]


def test_a_page_in_use_may_outlive_its_head() -> None:
    pool = KnownPool(8, 1, root_len=1, num_roots=1)
    pool.allocate("a")
    pool.append(["a"], [2])
    pool.fork("a", "b")
    pool.insert("a", [1, 7, 8])
    pool.free("a")
    pool.begin("c", [2, 9])
    check_pool(pool)
    assert pool.match_prefix([1, 7, 8]) == 0
    assert (len(pool._cached), len(pool.block_table("b"))) == (0, 2)


def test_place_shares_pages_as_they_were() -> None:
    pool = PagePool(8, 2)
    pages = pool.place({"a": [0, 1, 2], "b": [0, 1], "c": []}, [5, 3, 0])
    assert pool.block_table("a") == tuple(pages)
    assert pool.block_table("b") == tuple(pages[:2])
    assert (pool.length("a"), pool.length("b"), pool.num_free) == (5, 3, 5)
    assert len(pool.append("ab", [1, 1]).copies) == 1
    check_pool(pool)


def test_a_sequence_may_be_known_by_another_id() -> None:
    pool = grown(4, 2, a=[1, 2, 3])
    table = pool.block_table("a")
    pool.rename("a", "b")
    assert pool.ids == ["b"]
    assert pool.block_table("b") == table
    check_pool(pool)


def test_a_chain_of_many_pages_ends_without_recursion() -> None:
    pool = grown(50_000, 1, a=range(50_000))
    pool.free("a")
    assert pool.match_prefix(range(50_000)) == 50_000
    pool.allocate("b")
    pool.append(["b"], [50_000])
    check_pool(pool)
    assert pool.num_free == 0


def test_pages_that_are_not_there_are_refused_and_nothing_changes() -> None:
    pool = grown(4, 4, a=range(5))
    before = seen(pool, "a")
    with pytest.raises(OutOfPagesError, match="3 pages are needed"):
        pool.place({"b": [0, 1, 2]}, [9])
    check_pool(pool)
    assert seen(pool, "a") == before
