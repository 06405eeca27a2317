"""How large a paged cache is, and which sequences it takes in (3 s)."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import pytest
import torch
from example_plan import example_plan
from invariants import check_invariants
from latent_plans import latent_plan
from paged_cases import PAGE, RECENT, SINKS, begin, extend, make

from kvquant import LatentPagedKVCache, PagedBatch, PagedKVCache
from kvquant.errors import ConfigError, OutOfPagesError

SHAPE = 2, 2, 64
SMALL: dict[str, Any] = {"page_size": PAGE, "sink_len": SINKS, "recent_len": RECENT}
SMALL |= {"max_seq_len": 400}
CASES: dict[str, tuple[type[PagedKVCache], tuple[int, ...], dict[str, Any]]] = {
    "heads": (PagedKVCache, SHAPE, {"k_format": "int8", "rollback_len": 4}),
    "windows": (PagedKVCache, SHAPE, {"windows": [32, None]}),
    "plan": (PagedKVCache, (), {"plan": example_plan()}),
    "latents": (LatentPagedKVCache, (2,), {"fmt": "int8-g4", "exact_format": "fp16"}),
    "latent plan": (LatentPagedKVCache, (), {"plan": latent_plan()}),
}


@pytest.mark.parametrize("slots", [{"max_num_seqs": 3}, {"seq_len": 200}, {}])
@pytest.mark.parametrize("case", CASES)
def test_a_cache_takes_the_memory_that_it_is_given(case: str, slots: dict[str, Any]) -> None:
    kind, shape, options = CASES[case]
    nbytes = 2_000_000
    cache = kind.for_memory(nbytes, *shape, **SMALL, **options, **slots)
    assert type(cache) is kind
    assert nbytes - cache.rows.page_bytes < cache.nbytes <= nbytes
    most = cache.num_free_seq_slots
    assert most == slots.get("max_num_seqs", most if "seq_len" in slots else 16)
    room = cache.state.pool.num_pages * PAGE + most * (SINKS + RECENT)
    assert cache.token_capacity == room and f"room for {room} tokens" in repr(cache)


def test_as_many_sequences_fit_as_there_are_slots() -> None:
    """Each of the length that was asked for, to its end, and not one more."""
    cache = PagedKVCache.for_memory(400_000, *SHAPE, **SMALL, seq_len=150)
    batch, count = PagedBatch(cache, 1, 150), cache.num_free_seq_slots
    assert count > 3
    for name in range(count):
        begin(batch, name, 150)
    assert cache.num_free_pages * cache.rows.page_bytes < 150 * cache.rows.page_bytes / PAGE
    assert cache.state.split.packed_len(150) == cache.state.packed_lens.max()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"nbytes": 1000}, r"1000 bytes are too few: a page takes \d+, and each of 16 sequence"),
        ({"nbytes": -1}, "-1 bytes are too few"),
        ({"nbytes": 1.5}, r"nbytes 1.5 is not possible"),
        ({"nbytes": 1000, "seq_len": 10}, "each of 1 sequence slots"),
        ({"nbytes": 0, "seq_len": 400}, "0 bytes are too few"),
        ({"num_pages": 3}, "num_pages follows from nbytes"),
        ({"seq_len": 10, "max_num_seqs": 2}, "give no max_num_seqs with it"),
        ({"seq_len": 401}, "at most max_seq_len, 400"),
        ({"seq_len": 0}, "seq_len 0 is not possible"),
        ({"max_num_seqs": 0}, "max_num_seqs 0 is not possible"),
    ],
)
def test_sizes_that_are_not_possible_are_refused(options: dict[str, Any], message: str) -> None:
    given = {"nbytes": 1_000_000} | options
    with pytest.raises(ConfigError, match=message):
        PagedKVCache.for_memory(given.pop("nbytes"), *SHAPE, **SMALL, **given)


def test_a_plan_has_its_shape() -> None:
    with pytest.raises(ConfigError, match=r"shape of its own: give it without \[2, 2, 64\]"):
        PagedKVCache.for_memory(1_000_000, *SHAPE, plan=example_plan(), **SMALL)
    with pytest.raises(ConfigError, match="k_format"):
        PagedKVCache.for_memory(1_000_000, plan=example_plan(), k_format="int8", **SMALL)


# Admission


@pytest.mark.parametrize("windows", [None, [20, 20]], ids=str)
def test_room_is_promised_until_it_is_used(windows: list[int] | None) -> None:
    cache = make(num_pages=6, windows=windows)
    batch = PagedBatch(cache, 2, 100)
    assert cache.allocate("a", room=60) == 0 and cache.allocate("b") == 0
    assert cache.num_free_pages == 2
    assert cache.can_append(["b"], 40) and not cache.can_append(["b"], 41)
    with pytest.raises(OutOfPagesError, match=r"'b' need 3 more .*, but 2 of 6 are free"):
        batch.extend(["b"], 41).__enter__()
    with pytest.raises(OutOfPagesError, match="'c' needs 3 more pages"):
        cache.allocate("c", room=41)
    assert not cache.can_append(["a", "b"], [1, 41])
    assert cache.can_append(["a", "b"], [60, 40]) and not cache.can_append(["a", "b"], [60, 41])
    for parts in ([30, 30], [60]):
        for count in parts:
            extend(batch, ["a"], count)
            assert cache.num_free_pages == 2
        cache.truncate("a", 0)
        assert cache.num_free_pages == 2 and not cache.can_append(["b"], 41)
        check_invariants(cache)
    cache.swap_out("a")  # nothing is reserved while it is copied
    assert cache.num_free_pages == 6
    cache.finish_swaps()
    assert cache.num_free_pages == 6 and cache.can_append(["b"], 100)
    cache.swap_in("a")
    assert cache.num_free_pages == 6


def test_a_fork_takes_no_reserved_rows_of_windows() -> None:
    """A page that the fork sees too is not free when the parent is past it."""
    cache = make(num_pages=10, windows=[32, 32], max_seq_len=400)
    batch = PagedBatch(cache, 2, 100)
    cache.allocate("a", room=300)
    extend(batch, ["a"], 60)
    cache.allocate("b", room=30)
    with pytest.raises(OutOfPagesError, match="'c' would share pages of 'a', but 0 of 10 are free"):
        cache.fork("a", "c")
    assert cache.ids == ["a", "b"]
    extend(batch, ["b"], 30)
    for _ in range(60):
        extend(batch, ["a"], 4)
    cache.fork("a", "c")  # all that is reserved is used
    extend(batch, ["a", "c"], 0)  # takes no page
    check_invariants(cache)


@pytest.mark.parametrize("windows", [[32], [32, 48]], ids=str)
def test_nobody_stops_within_reserved_room_though_prefixes_are_shared(windows: list[int]) -> None:
    options = {"num_layers": len(windows), "max_num_seqs": 6, "max_seq_len": 512}
    for seed in (0, 6, 16):
        draw = random.Random(seed)
        cache = make(num_pages=14, windows=windows, sink_len=4, recent_len=16, **options)
        batch, rooms = PagedBatch(cache, 6, 100), dict[int, int]()
        for number in range(300):
            if draw.random() < 0.15:
                rooms[number] = (length := draw.randint(40, 200)) + draw.randint(0, 150)
                try:
                    cache.allocate(number, [1] * length, room=rooms[number])
                except OutOfPagesError:
                    del rooms[number]
            elif live := [name for name in rooms if cache.length(name) < rooms[name]]:
                names = draw.sample(live, draw.randint(1, len(live)))
                extend(batch, names, 1, [1] * len(names))
            check_invariants(cache)


def test_what_is_shared_is_not_promised_twice() -> None:
    """Pages that a fork keeps do not come back when the sequence is cut."""
    cache, tokens = make(num_pages=6), list(range(60))
    batch = PagedBatch(cache, 1, 100)
    assert cache.allocate("a", tokens, room=60) == 0
    extend(batch, ["a"], 60, tokens)
    cache.fork("a", "b")
    cache.truncate("a", 0)
    assert cache.num_free_pages == 2
    check_invariants(cache)
    cache.free("a")
    cache.free("b")
    present = cache.match_prefix(tokens)
    assert cache.num_free_pages == 6 and present == SINKS + 3 * PAGE
    assert cache.allocate("c", room=100) == 0  # the 6 pages, of which 3 hold the prefix
    assert cache.num_free_pages == 0
    with pytest.raises(OutOfPagesError, match="needs 0 more pages"):
        cache.allocate("d", tokens)
    extend(batch, ["c"], 100)
    check_invariants(cache)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_begun_finds_its_pages_and_what_is_not_does_not(seed: int) -> None:
    chosen = random.Random(seed)
    torch.manual_seed(seed)
    cache = make(num_pages=10)
    batch = PagedBatch(cache, 1, 100)
    texts = [[chosen.randrange(3) for _ in range(SINKS)] + list(range(90)) for _ in range(4)]
    rooms: dict[Any, int] = {}
    for number in range(40):
        text = chosen.choice(texts)[: chosen.randrange(1, 90)]
        room = chosen.randrange(len(text), 101)
        free, found = cache.num_free_pages, cache.match_prefix(text)
        if not cache.num_free_seq_slots:
            cache.free(chosen.choice(cache.ids))
            continue
        try:
            present = cache.allocate(number, text, room=room)
        except OutOfPagesError:
            assert (cache.num_free_pages, cache.match_prefix(text)) == (free, found)
            assert number not in cache.ids
            with suppress(OutOfPagesError):
                assert cache.allocate(number, text) == found
                assert not cache.can_append([number], room - found)
                cache.free(number)
            for name in cache.ids[: chosen.randrange(4)]:
                cache.free(name)
        else:
            rooms[number] = room
            assert present == found and cache.can_append([number], room - present)
            if chosen.random() < 0.8:
                extend(batch, [number], len(text) - present, text[present:])
        for name in cache.ids:  # what was promised is there, for each and for all of them
            assert cache.can_append([name], rooms[name] - cache.length(name))
        rest = [rooms[name] - cache.length(name) for name in cache.ids]
        assert cache.can_append(cache.ids, rest)
        check_invariants(cache)


def test_a_plan_of_false_is_none() -> None:
    plain, none = (PagedKVCache.for_memory(2**26, 4, 2, 64, plan=p) for p in (None, False))
    assert none.token_capacity == plain.token_capacity and none.bases is None
