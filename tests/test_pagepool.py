"""PagePool rule by rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kvquant.errors import (
    ConfigError,
    InvariantError,
    KVQuantError,
    OutOfPagesError,
    ShapeError,
)
from kvquant.pagepool import Growth, PagePool


def grown(num_pages: int, page_size: int, **sequences: Sequence[int]) -> PagePool:
    """A pool with sequences of known tokens."""
    pool = PagePool(num_pages, page_size)
    for name, tokens in sequences.items():
        extend(pool, name, tokens)
    return pool


def extend(pool: PagePool, name: str, tokens: Sequence[int]) -> int:
    """Allocate a sequence and append what is not there; return what was."""
    present = pool.allocate(name, tokens)
    pool.append(name, len(tokens) - present, tokens[present:])
    pool.check()
    return present


def seen(pool: PagePool, ids: str) -> object:
    tables = [(pool.block_table(i), pool.length(i)) for i in ids]
    return tables, pool.num_free, pool.num_cached


def test_append_takes_pages_as_needed() -> None:
    pool = PagePool(4, 4)
    assert pool.allocate("a") == 0
    assert pool.append("a", 0) == Growth((), ())
    assert [len(pool.append("a", n).new_pages) for n in (1, 3, 1, 4)] == [1, 0, 1, 1]
    assert pool.length("a") == 9
    assert len(set(pool.block_table("a"))) == 3
    assert pool.num_free == 1


def test_of_two_forks_the_first_to_write_copies_and_the_other_keeps_the_page() -> None:
    pool = grown(4, 4, a=range(6))
    pool.fork("a", "b")
    first, last = pool.block_table("a")
    assert pool.block_table("b") == (first, last)
    [(source, target)] = pool.append("b", 1).copies
    assert source == last
    assert pool.block_table("b") == (first, target)
    assert pool.append("a", 1) == Growth((), ())
    assert pool.block_table("a") == (first, last)


def test_a_full_last_page_is_not_copied() -> None:
    pool = grown(4, 4, a=range(4))
    pool.fork("a", "b")
    assert pool.append("b", 1).copies == ()
    assert pool.block_table("b")[0] == pool.block_table("a")[0]


@pytest.mark.parametrize("num_pages, fits", [(4, False), (5, True)])
def test_can_append_counts_the_copies_of_shared_pages(num_pages: int, fits: bool) -> None:
    pool = grown(num_pages, 4, a=range(5))
    pool.fork("a", "b")
    pool.fork("a", "c")
    assert pool.can_append("ab", 1)
    assert pool.can_append("abc", 3) is (num_pages >= 4)
    assert pool.can_append("abc", 0)
    pool.allocate("d")
    assert pool.can_append("abcd", 1) is fits


def test_out_of_pages_changes_nothing() -> None:
    pool = grown(3, 2, a=[1, 2, 3])
    pool.fork("a", "b")
    before = seen(pool, "ab")
    with pytest.raises(OutOfPagesError, match=r"'b' needs 2 more pages for 3 tokens, but 1 of 3"):
        pool.append("b", 3, [4, 5, 6])
    assert seen(pool, "ab") == before
    assert pool.match_prefix([1, 2, 3, 4]) == 2


def test_a_prefix_is_shared_in_whole_pages() -> None:
    pool = grown(8, 4, a=range(10))
    assert pool.match_prefix(range(20)) == 8
    assert pool.match_prefix(range(7)) == 4
    assert pool.match_prefix([0, 1, 2, 9]) == 0
    assert pool.allocate("b", range(9)) == pool.length("b") == 8
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
    assert (pool.num_free, pool.num_cached) == (4, 2)
    assert extend(pool, "b", [1, 2, 3, 4, 5]) == 4
    assert pool.block_table("b")[:2] == table
    assert (pool.num_free, pool.num_cached) == (1, 0)


def test_the_least_recently_used_pages_go_first_and_the_last_of_a_prefix() -> None:
    pool = grown(6, 2, a=[1, 2, 3, 4], b=[5, 6, 7, 8])
    pool.free("a")
    pool.free("b")
    pool.allocate("a", [1, 2, 3, 4])
    pool.free("a")  # used after b
    pool.allocate("c")
    matches = []
    for _ in range(6):
        pool.append("c", 2)
        pool.check()
        matches.append([pool.match_prefix(t) for t in ([1, 2, 3, 4], [5, 6, 7, 8])])
    assert matches == [[4, 4], [4, 4], [4, 2], [4, 0], [2, 0], [0, 0]]


def test_pages_after_unknown_tokens_have_no_names_until_these_are_cut() -> None:
    pool = grown(8, 2, a=[1, 2, 3])
    pool.append("a", 2)
    pool.append("a", 3, [6, 7, 8])
    assert pool.match_prefix([1, 2, 3]) == 2
    pool.truncate("a", 3)
    pool.append("a", 3, [4, 5, 6])
    assert pool.match_prefix(range(1, 9)) == 6


def test_a_cut_page_keeps_its_name_until_it_is_written() -> None:
    pool = grown(4, 4, a=range(12))
    pool.truncate("a", 6)
    assert pool.match_prefix(range(12)) == 12
    assert pool.num_cached == 1
    assert pool.append("a", 2, [0, 0]) == Growth((), ())
    assert pool.match_prefix(range(12)) == 4
    assert pool.match_prefix([0, 1, 2, 3, 4, 5, 0, 0]) == 8
    assert pool.num_cached == 0  # no name leads to the page behind
    pool.check()


def test_a_cut_page_that_another_sequence_found_is_copied() -> None:
    pool = grown(4, 4, a=range(8))
    pool.truncate("a", 6)
    pool.allocate("b", range(8))
    assert len(pool.append("a", 1, [9]).copies) == 1
    assert pool.match_prefix(range(8)) == 8


def test_of_pages_with_the_same_tokens_one_stays_cached() -> None:
    pool = PagePool(6, 2)
    for name in "abc":
        pool.allocate(name)
    for name in "ab":
        pool.append(name, 4, [1, 2, 3, 4])
    pool.free("a")
    assert (pool.num_cached, pool.match_prefix([1, 2, 3, 4])) == (0, 4)
    pool.free("b")
    assert pool.num_cached == 2
    pool.append("c", 4, [1, 2, 3, 4])
    assert (pool.num_cached, pool.match_prefix([1, 2, 3, 4])) == (0, 4)
    pool.check()


def test_a_chain_of_many_pages_ends_without_recursion() -> None:
    pool = grown(50_000, 1, a=range(50_000))
    pool.free("a")
    assert pool.match_prefix(range(50_000)) == 50_000
    pool.allocate("b")
    pool.append("b", 50_000)
    pool.check()
    assert pool.num_free == 0


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda pool: PagePool(0, 4), ConfigError, "num_pages 0"),
        (lambda pool: PagePool(4, 0), ConfigError, "page_size 0"),
        (lambda pool: pool.allocate("a"), ConfigError, "'a' exists"),
        (lambda pool: pool.allocate("b", [0.5]), ConfigError, "must be integers"),
        (lambda pool: pool.append("b", 1), ConfigError, "no sequence 'b'"),
        (lambda pool: pool.append("a", -1), ShapeError, "-1 tokens is negative"),
        (lambda pool: pool.append("a", 2, [1]), ShapeError, "1 tokens for a count of 2"),
        (lambda pool: pool.can_append("ab", 1), ConfigError, "no sequence 'b'"),
        (lambda pool: pool.can_append("aa", 1), ConfigError, "name each once"),
        (lambda pool: pool.can_append("a", -1), ShapeError, "negative"),
        (lambda pool: pool.fork("b", "c"), ConfigError, "no sequence 'b'"),
        (lambda pool: pool.fork("a", "a"), ConfigError, "'a' exists"),
        (lambda pool: pool.truncate("a", 6), ShapeError, "has 5 tokens: it cannot"),
        (lambda pool: pool.truncate("a", -1), ShapeError, "truncated to -1"),
        (lambda pool: pool.truncate("b", 0), ConfigError, "no sequence 'b'"),
        (lambda pool: pool.free("b"), ConfigError, "no sequence 'b'"),
        (lambda pool: pool.block_table("b"), ConfigError, "no sequence 'b'"),
        (lambda pool: pool.length("b"), ConfigError, "no sequence 'b'"),
    ],
)
def test_refusals_say_why_and_change_nothing(
    call: Callable[[PagePool], object], error: type[KVQuantError], message: str
) -> None:
    pool = grown(4, 4, a=range(5))
    before = seen(pool, "a")
    with pytest.raises(error, match=message):
        call(pool)
    pool.check()
    assert seen(pool, "a") == before


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda pool: pool._free.append(pool._free[0]), "lost or in two states"),
        (lambda pool: pool._free.pop(), "lost or in two states"),
        (lambda pool: pool._free.append(0), "lost or in two states"),
        (lambda pool: pool._references.__setitem__(0, 2), "references are not the uses"),
        (lambda pool: pool._names.of_page.__setitem__(0, None), "pages and names do not agree"),
        (
            lambda pool: pool._names.of_page.__setitem__(3, pool._names.of_page[0]),
            "names do not agree",
        ),
        (lambda pool: pool._names.of_page[0].pages.clear(), "names do not agree"),
        (lambda pool: pool._names.root.children.popitem(), "names do not agree"),
        (lambda pool: pool._free.append(pool._cached.popitem()[0]), "is free or a cached twin"),
        (lambda pool: pool._unname(2), "cached without a name"),
        (lambda pool: setattr(pool._names.of_page[0], "parent", None), "no page or no parent"),
        (lambda pool: setattr(pool._sequences["a"], "length", 3), "length or pages"),
        (lambda pool: setattr(pool._sequences["a"], "named", 2), "known tokens"),
        (lambda pool: setattr(pool._sequences["a"], "tail", (1, 2)), "known tokens"),
        (lambda pool: pool._unname(0), "names not in order"),
    ],
)
def test_check_names_what_is_wrong(damage: Callable[[PagePool], object], message: str) -> None:
    pool = grown(4, 4, a=range(5), b=range(10, 14))
    pool.free("b")
    pool.check()
    damage(pool)
    with pytest.raises(InvariantError, match=message):
        pool.check()
