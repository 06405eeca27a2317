"""Calls on a paged cache in which any operation of torch finds no memory: nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from invariants import check_invariants
from paged_cases import LAYERS, begin, extend, make, new_rows, same, values
from slow_cases import mark_slow
from torch.utils._python_dispatch import TorchDispatchMode

from kvquant.errors import CheckpointError, ConfigError, NonFiniteError
from kvquant.io.sequences import load_sequences, save_sequences
from kvquant.paged.batch import PagedBatch
from kvquant.paged.cache import PagedKVCache

PROMPT = list(range(60))
OTHER = [*range(3), *range(200, 257)]  # the same sinks
Call = Callable[[PagedBatch, Path], object]


class NoMemory(TorchDispatchMode):
    """Lets the operation `at` fail, counted from 0."""

    def __init__(self, at: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.left = at

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.left == 0:
            raise MemoryError(f"no memory for {func}")
        self.left -= 1
        return func(*args, **(kwargs or {}))


def filled() -> PagedBatch:
    """Sequences "a", a fork "b" of it that shares a partly filled page, "c" that begins as "a" did,
    "d" of other tokens, and "gone", swapped out."""
    batch = PagedBatch(make(num_pages=60, max_num_seqs=12), 6, 150)
    cache = batch.cache
    begin(batch, "a", 60, PROMPT)
    cache.fork("a", "b")
    present = cache.allocate("c", PROMPT)
    extend(batch, ["c"], 60 - present, PROMPT[present:])
    begin(batch, "d", 60, OTHER)
    begin(batch, "gone", 50, range(300, 350))
    cache.swap_out("gone")
    return batch


def state(cache: PagedKVCache) -> object:
    """All that can be seen of a cache but its rows."""
    of = cache.state
    each = [(i, cache.length(i), of.pool.block_table(i), list(of.tokens(i))) for i in cache.ids]
    found = [cache.match_prefix([*tokens, 0]) for tokens in (PROMPT, OTHER, range(300, 350))]
    parked = [(i, cache.length(i)) for i in cache.swapped_ids]
    free = cache.num_free_pages, cache.num_free_seq_slots
    return each, found, parked, free, cache.bad_rows.tolist()


def spoil(batch: PagedBatch, _: Path) -> None:
    """A step after which there are rows with NaN, to be found by check."""
    rows = new_rows(4)
    rows[0, 0] = torch.nan
    batch.cache.allocate("bad")
    extend(batch, ["bad"], 4, rows=rows)


def check(batch: PagedBatch) -> None:
    with pytest.raises(NonFiniteError, match="free"):
        batch.cache.check()


BEFORE: dict[str, Call] = {  # what comes before the call
    "touch what came": lambda batch, _: batch.cache.swap_in("gone"),
    "load": lambda batch, folder: save_sequences(batch.cache, ["a", "c"], folder / "x.safetensors"),
    "check": spoil,
}
CALLS: dict[str, Call] = {
    "allocate": lambda batch, _: batch.cache.allocate("new", PROMPT),
    "fork": lambda batch, _: batch.cache.fork("a", "new"),
    "truncate": lambda batch, _: batch.cache.truncate("a", 30),
    "free": lambda batch, _: batch.cache.free("a"),
    "swap out": lambda batch, _: batch.cache.swap_out("a"),
    "swap in": lambda batch, _: batch.cache.swap_in("gone"),
    "touch what came": lambda batch, _: batch.cache.truncate("gone", 40),
    "save": lambda batch, folder: save_sequences(batch.cache, ["a", "d"], folder / "x.safetensors"),
    "load": lambda batch, folder: load_sequences(
        batch.cache, folder / "x.safetensors", ids={"a": "e", "c": "f"}
    ),
    "check": lambda batch, _: check(batch),
    "dequantized": lambda batch, _: batch.cache.dequantized("a", 0),
}
USUAL = ("allocate", "fork", "truncate", "free", "swap out", "swap in", "save")


FEW = [(name, 3) for name in USUAL]  # every third operation fails


@pytest.mark.parametrize("case", mark_slow([*((c, 1) for c in CALLS), *FEW], FEW), ids=str)
def test_a_call_without_memory_has_changed_nothing(case: tuple[str, int], tmp_path: Path) -> None:
    name, stride = case
    call = CALLS[name]
    fails, steps = 0, stride * (7 if name in ("save", "load") else 1)  # these have many
    while True:
        torch.manual_seed(0)
        batch = filled()
        cache = batch.cache
        if name in BEFORE:
            BEFORE[name](batch, tmp_path)
        seen = state(cache)
        here = [i for i in cache.ids if i not in cache.swap_space._arriving]
        rows = {i: [x.nan_to_num() for x in values(cache, i)] for i in here}
        try:
            with NoMemory(steps * fails):
                call(batch, tmp_path)
        except (MemoryError, CheckpointError):  # "... more than there is"
            pass
        else:
            break
        fails += 1
        check_invariants(cache)
        assert state(cache) == seen
        for i, expected in rows.items():
            assert same([x.nan_to_num() for x in values(cache, i)], expected)
        call(batch, tmp_path)  # now there is memory
        check_invariants(cache)
    assert fails > 0 or name in ("truncate", "free", "touch what came")


def test_sinks_that_could_not_be_kept_are_given_to_nobody() -> None:
    """The rows of a step are written, and then there is no memory to keep its sinks."""
    fails, tokens = 0, list(range(400, 460))
    while True:
        torch.manual_seed(0)
        batch = filled()
        cache = batch.cache
        cache.allocate("e")
        rows = new_rows(60)
        step = batch.extend(["e"], 60, tokens)
        step.__enter__()
        for layer in range(LAYERS):
            batch.append(layer, *rows)
        try:
            with NoMemory(fails):
                step.__exit__(None, None, None)
        except MemoryError:
            pass
        else:
            break
        fails += 1
        check_invariants(cache)
        assert (cache.length("e"), cache.match_prefix(tokens)) == (60, 0)
        extend(batch, ["e"], 20, range(20))  # the next full page lets them be kept
        present = cache.allocate("new", tokens)
        assert present > 0
        kept = zip(values(cache, "new"), values(cache, "e"), strict=True)
        assert all(torch.equal(x, y[:, :present]) for x, y in kept)
    assert fails > 1


def test_a_step_without_memory_fails_its_sequences() -> None:
    fails = 0
    while True:
        torch.manual_seed(0)
        batch = filled()
        cache, rows = batch.cache, new_rows(2).float()
        before = {i: values(cache, i) for i in ("b", "d")}
        try:
            with NoMemory(fails):
                extend(batch, ["a", "c"], 1, rows=rows)
        except MemoryError:
            pass
        else:
            break
        fails += 1
        check_invariants(cache)
        for i in ("a", "c"):
            with pytest.raises(ConfigError, match="has failed"):
                cache.length(i)
            cache.free(i)
        for i, expected in before.items():
            assert same(values(cache, i), expected)
        extend(batch, ["b", "d"])
        check_invariants(cache)
    assert fails > 5
