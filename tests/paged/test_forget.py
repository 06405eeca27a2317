"""Rows with NaN in a paged cache: after a check nobody begins with them."""

from __future__ import annotations

import pytest
import torch
from invariants import check_invariants
from paged_cases import LAYERS, PAGE, RECENT, SINKS, SlowEvent, extend, make, new_rows, values

from kvquant.errors import NonFiniteError
from kvquant.paged.batch import PagedBatch
from kvquant.paged.cache import PagedKVCache
from kvquant.paged.pool import SequenceId

LENGTH = 60
PROMPT = list(range(LENGTH))
FULL = SINKS + (LENGTH - SINKS - RECENT) // PAGE * PAGE  # tokens of PROMPT that are found
# a token of each kind of row
TOKENS = {"sink": 1, "full page": SINKS + 20, "partial page": FULL + 1, "ring": LENGTH - 2}


def fill(
    batch: PagedBatch, name: SequenceId, tokens: list[int], bad: int | None = None, layer: int = 0
) -> int:
    """Begin a sequence, with NaN at one of its tokens in one layer; how many were present."""
    present = batch.cache.allocate(name, tokens)
    with batch.extend([name], len(tokens) - present, tokens[present:]):
        for at in range(batch.cache.num_layers):
            k, v = new_rows(len(tokens) - present)
            if bad is not None and at == layer:
                (k, v)[layer % 2][bad - present, 0, 5] = torch.nan
            batch.append(at, k, v)
    return present


def has_nan(cache: PagedKVCache, name: SequenceId) -> bool:
    return any(bool(x.isnan().any()) for x in values(cache, name))


def assert_nobody_begins_with_nan(batch: PagedBatch, tokens: list[int]) -> None:
    """Two sequences with these tokens, the second one after the first one is written."""
    cache = batch.cache
    for name in ("first", "second"):
        fill(batch, name, tokens)
        assert not has_nan(cache, name)
        cache.free(name)
        check_invariants(cache)
    assert cache.match_prefix([*tokens, 0]) > 0


@pytest.mark.parametrize("others", ["", "fork", "fork swapped out", "swapped out", "leaving"])
@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("where", TOKENS)
def test_after_a_check_nobody_begins_with_nan(
    where: str, layer: int, others: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = PagedBatch(make(num_pages=20), 4, 100)
    cache = batch.cache
    fill(batch, "bad", PROMPT, TOKENS[where], layer)
    if "fork" in others:
        cache.fork("bad", "fork")
    if others == "leaving":
        monkeypatch.setattr(cache.swap_space, "_event", SlowEvent)
    if others != "fork" and others:
        cache.swap_out("fork" if "fork" in others else "bad")
    with pytest.raises(NonFiniteError):
        cache.check()
    cache.check()
    check_invariants(cache)
    assert cache.match_prefix([*PROMPT, 0]) == 0
    cache.free("bad")
    check_invariants(cache)
    assert_nobody_begins_with_nan(batch, PROMPT)
    if "fork" in others:
        if cache.swapped_ids:
            cache.swap_in("fork")
        extend(batch, ["fork"], 20, range(20))  # fills the page
        cache.free("fork")
        assert_nobody_begins_with_nan(batch, [*PROMPT, *range(20)])


def test_what_is_forgotten_is_found_again_once_it_is_written() -> None:
    batch = PagedBatch(make(num_pages=20), 4, 100)
    cache = batch.cache
    fill(batch, "a", PROMPT)
    fill(batch, "b", PROMPT)
    cache.swap_out("b")
    before = values(cache, "a")
    cache.forget_prefixes()
    check_invariants(cache)
    assert cache.match_prefix([*PROMPT, 0]) == 0
    cache.swap_in("b")
    extend(batch, ["a", "b"], 20, [*range(20)] * 2)  # fills a page, of tokens that are forgotten
    assert cache.match_prefix([*PROMPT, *range(20), 0]) == 0
    assert all(
        torch.equal(x[:, :40], y[:, :40]) for x, y in zip(values(cache, "a"), before, strict=True)
    )
    assert fill(batch, "new", PROMPT) == 0
    assert cache.allocate("heir", PROMPT) == FULL
    kept = zip(values(cache, "heir"), values(cache, "new"), strict=True)
    assert all(torch.equal(x, y[:, :FULL]) for x, y in kept)
    for name in ("a", "b", "new", "heir"):
        cache.free(name)
    check_invariants(cache)
    assert cache.num_free_pages == 20


def test_inside_a_step_check_leaves_the_count_for_later() -> None:
    batch = PagedBatch(make(), 4, 100)
    cache = batch.cache
    rows = new_rows(10)
    rows[0, 4] = torch.nan
    cache.allocate("a")
    with batch.extend(["a"], 10):
        for layer in range(LAYERS):
            batch.append(layer, *rows)
        with pytest.raises(NonFiniteError):
            cache.check()
    with pytest.raises(NonFiniteError, match="free the sequences whose outputs are NaN"):
        cache.check()
    cache.check()
