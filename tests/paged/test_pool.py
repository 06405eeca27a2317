"""PagePool rule by rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from invariants import check_pool

from kvquant.paged.pool import Growth, PagePool


class KnownPool(PagePool):
    """A pool of sequences with known tokens, published as soon as they are written."""

    def __init__(self, num_pages: int, page_size: int, **options: Any) -> None:
        super().__init__(num_pages, page_size, **options)
        self.known: dict[Any, list[int]] = {}

    def write(self, name: str, count: int, tokens: Sequence[int] | None = None) -> Growth:
        length = self._sequences[name].length
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


def test_tokens_of_the_same_hash_do_not_match() -> None:
    assert hash((-1, -1)) == hash((-2, -2))
    pool = grown(4, 2, a=[-1, -1, -1, -1])
    assert pool.match_prefix([-2, -2, -1, -1]) == 0
    assert pool.match_prefix([-1, -1, -2, -2]) == 2


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


def test_a_chain_of_many_pages_ends_without_recursion() -> None:
    pool = grown(50_000, 1, a=range(50_000))
    pool.free("a")
    assert pool.match_prefix(range(50_000)) == 50_000
    pool.allocate("b")
    pool.append(["b"], [50_000])
    check_pool(pool)
    assert pool.num_free == 0
