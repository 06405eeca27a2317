"""Sequences that move to host memory and back."""

from __future__ import annotations

import pytest
import torch
from invariants import check_invariants
from paged_cases import (
    DIM,
    RECENT,
    SlowEvent,
    begin,
    captured,
    extend,
    make,
    new_rows,
    same,
    values,
)

from kvquant.paged.batch import PagedBatch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [0, 2, 6, 40])
def test_a_sequence_comes_back_as_it_went(count: int, device: str) -> None:
    cache = make(device=device)
    batch = PagedBatch(cache, 4, 100)
    begin(batch, "a", count, range(count))
    before, free = values(cache, "a"), cache.num_free_pages
    cache.swap_out("a")
    cache.finish_swaps()
    assert (cache.ids, cache.swapped_ids) == ([], ["a"])
    assert (cache.num_free_pages, cache.num_free_seq_slots) == (12, 4)
    assert cache.length("a") == count
    begin(batch, "b", 90)  # takes its pages and its sequence slot
    cache.swap_in("a")
    assert (cache.ids, cache.swapped_ids) == (["b", "a"], [])
    assert same(values(cache, "a"), before)
    cache.free("b")
    assert cache.num_free_pages == free
    assert cache.state.tokens("a") == list(range(count))
    extend(batch, ["a"], 10)
    check_invariants(cache)


@pytest.mark.parametrize("device", DEVICES)
def test_pages_that_came_back_are_found_again(device: str) -> None:
    cache = make(device=device)
    batch = PagedBatch(cache, 4, 100)
    begin(batch, "a", 45, range(45))
    cache.swap_out("a")
    cache.finish_swaps()
    begin(batch, "b", 100)
    begin(batch, "c", 90)  # together they need all pages: none stays cached
    assert cache.match_prefix(range(45)) == 0
    cache.free("b")
    cache.swap_in("a")
    extend(batch, ["a"], 0)
    assert cache.match_prefix(range(45)) == 35
    cache.allocate("d", range(45))
    kept = zip(values(cache, "d"), values(cache, "a"), strict=True)
    assert all(torch.equal(x, y[:, :35]) for x, y in kept)


def test_pages_are_held_until_the_copy_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make(num_pages=3)
    batch = PagedBatch(cache, 4, 100)
    event = SlowEvent()
    begin(batch, "a", 40)
    before = values(cache, "a")
    monkeypatch.setattr(cache.swap_space, "_event", lambda: event)
    cache.swap_out("a")
    assert (cache.num_free_pages, cache.num_free_seq_slots, cache.ids) == (1, 3, [])
    check_invariants(cache)
    cache.swap_in("a")  # its pages are still its own
    assert same(values(cache, "a"), before)
    cache.swap_out("a")
    cache.allocate("b")
    assert not cache.can_append(["b"], 40)
    cache.finish_swaps()
    assert cache.can_append(["b"], 40)
    cache.swap_out("b")
    cache.free("b")
    check_invariants(cache)
    assert cache.num_free_pages == 3


@pytest.mark.gpu
def test_swaps_run_beside_a_captured_loop() -> None:
    """Sequences leave and come back between replays; all keep their rows but the one packed."""
    cache = make(device="cuda", num_pages=40, max_num_seqs=6)
    batch = PagedBatch(cache, 4)
    prefill = PagedBatch(cache, 4, 100)
    for name in range(4):
        begin(prefill, name, 50 + name)
    rows, q = new_rows(4, "cuda"), torch.randn(4, 4, DIM, device="cuda").bfloat16()
    graph, outs = captured(batch, rows[0], rows[1], q)
    for step in range(30):
        gone, other = step % 4, (step + 1) % 4
        left = values(cache, gone)
        cache.swap_out(gone)
        before = values(cache, other)
        with batch.extend([i for i in range(4) if i != gone]):
            graph.replay()
        assert bool(outs[0].isfinite().all())
        for old, new in zip(before, values(cache, other), strict=True):
            length = old.shape[1]
            assert new.shape[1] == length + 1
            packed = length - RECENT  # the row that has left the window
            assert torch.equal(new[:, :packed], old[:, :packed])
            assert torch.equal(new[:, packed + 1 : length], old[:, packed + 1 :])
            assert bool((new[:, packed] - old[:, packed]).abs().max() < 0.5)
        cache.swap_in(gone)
        assert same(values(cache, gone), left)
        check_invariants(cache)
