"""Ctrl-C at any line of a call of a paged cache: it has the right rows, or refuses every call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupts import interrupted
from invariants import check_invariants
from paged_cases import poison
from slow_cases import mark_slow

from kvquant.errors import ConfigError
from kvquant.io import sequences
from kvquant.io.sequences import load_sequences, save_sequences
from kvquant.paged import cache as paged
from kvquant.paged import state as paged_state
from kvquant.paged.batch import PagedBatch
from kvquant.paged.cache import PagedKVCache

NAMES = "cache batch state pool prefix_tree swap staged_tensors window_pages"
FILES = {str(Path(paged.__file__).with_name(f"{name}.py")) for name in NAMES.split()}
FILES.add(str(sequences.__file__))
NUM_PAGES, MAX_NUM_SEQS = 10, 5
A, Z = list(range(45)), list(range(100, 140))
B = [*A[:30], *range(60, 70)]
WINDOWS = [None, 8]
KNOWN = {"a": [*A, *range(45, 65)], "b": [*B, 70, 71], "c": [*A, 50, *range(51, 69)]}


def grow(
    batch: PagedBatch, ids: Sequence[str], counts: Sequence[int], tokens: Sequence[int]
) -> None:
    """One step whose rows hold the ids of their tokens."""
    with batch.extend(ids, counts, tokens):
        rows = torch.tensor(tokens).float()[:, None, None].expand(-1, 1, 64).contiguous()
        for layer in range(batch.cache.num_layers):
            batch.append(layer, rows, rows)


def filled(windows: Sequence[int | None] = (None,)) -> PagedBatch:
    """Sequences that share pages, a page that two write to, and pages that are only found."""
    options: dict[str, Any] = {"k_format": "int8", "v_format": "int8", "page_size": 16}
    options |= {"max_num_seqs": MAX_NUM_SEQS, "max_seq_len": 128, "sink_len": 2, "recent_len": 3}
    options |= {"windows": windows, "chunk_len": 16}
    batch = PagedBatch(PagedKVCache(len(windows), 1, 64, NUM_PAGES, **options), 4, 64)
    for name, tokens in (("a", A), ("b", B), ("z", Z)):
        present = batch.cache.allocate(name, tokens)
        grow(batch, [name], [len(tokens) - present], tokens[present:])
    batch.cache.free("z")
    batch.cache.fork("a", "c")
    grow(batch, ["c"], [1], [50])
    return batch


def shown(cache: PagedKVCache, name: Any) -> list[int]:
    """The ids of the tokens whose rows a sequence has."""
    poison(cache)
    length, found = cache.length(name), list[int]()
    for layer, window in enumerate(cache.windows):
        k, v = cache.dequantized(name, layer)
        assert k.equal(v) and k.shape[1] == min(length, window or length)
        seen = [round(x) for x in k[0, :, 0].tolist()]
        found = found or seen
        assert seen == found[-len(seen) :] or not seen
    return found


def cut(batch: PagedBatch) -> int:
    """A length that a may be cut to: a window has only its last pages."""
    return 38 if any(batch.cache.windows) else 20


Call = Callable[[PagedBatch, Path], Any]
CALLS: dict[str, Call] = {
    "allocate": lambda batch, _: batch.cache.allocate("n", Z),
    "fork": lambda batch, _: batch.cache.fork("a", "n"),
    "free": lambda batch, _: batch.cache.free("a"),
    "forget": lambda batch, _: batch.cache.forget_prefixes(),
    "truncate": lambda batch, _: batch.cache.truncate("a", cut(batch)),
    "swap out": lambda batch, _: batch.cache.swap_out("a"),
    "swap in": lambda batch, _: batch.cache.swap_in("a"),
    "load": lambda batch, path: load_sequences(batch.cache, path, ids={"a": "n"}),
    "step": lambda batch, _: grow(
        batch, ["a", "c", "b"], [20, 18, 2], [*range(45, 65), *range(51, 69), 70, 71]
    ),
}


FEW = [(name, 3) for name in ("fork", "step", "swap in")]  # at every third line


def check(batch: PagedBatch) -> None:
    """Every sequence has its own rows, prefixes are right, all can go on, and nothing is lost."""
    cache = batch.cache
    cache.finish_swaps()
    check_invariants(cache)
    for name in cache.swapped_ids:
        cache.swap_in(name)
    assert set(cache.ids) <= {"a", "b", "c", "n"}
    for name in map(str, cache.ids):
        found = shown(cache, name)
        assert any(found == known[: len(found)] for known in [KNOWN.get(name, A), Z]), name
    for tokens in (A, B, Z):
        present = cache.allocate("p", tokens)
        assert shown(cache, "p") == tokens[:present]
        cache.free("p")
    for name in map(str, cache.ids):
        found = shown(cache, name)
        grow(batch, [name], [3], [3, 4, 5])
        assert shown(cache, name) == [*found, 3, 4, 5]
    for each in cache.ids:
        cache.free(each)
    assert (cache.num_free_pages, cache.num_free_seq_slots) == (NUM_PAGES, MAX_NUM_SEQS)
    check_invariants(cache)


def check_or_refused(batch: PagedBatch) -> bool:
    """Whether the cache goes on; else it refuses every call that would read or change it."""
    cache = batch.cache
    try:
        cache.finish_swaps()
        cache.allocate("p")
    except ConfigError as error:
        assert "make another" in str(error)
        for call in (
            lambda: cache.allocate("q"),
            lambda: cache.free("b"),
            lambda: cache.fork("b", "q"),
            lambda: grow(batch, ["b"], [1], [3]),
        ):
            with pytest.raises(ConfigError, match="make another"):
                call()
        return False
    cache.free("p")
    for name in cache.ids:
        if name in cache.state.failed:
            with pytest.raises(ConfigError, match="has failed"):
                cache.dequantized(name, 0)
            cache.free(name)
    check(batch)
    return True


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files not closed
@pytest.mark.parametrize("windows", [(None,), WINDOWS], ids=["plain", "windows"])
@pytest.mark.parametrize("case", mark_slow([*((c, 1) for c in CALLS), *FEW], FEW), ids=str)
def test_an_interrupt_at_any_line_leaves_a_whole_cache(
    tmp_path: Path, case: tuple[str, int], windows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_state, "SPARE", 0)  # so that short sequences are past pages
    name, stride = case
    call, path = CALLS[name], tmp_path / "x.safetensors"
    save_sequences(filled(windows).cache, ["a"], path)
    torn, number, stride = 0, 1, stride * (3 if name in ("forget", "load", "step") else 1)
    while True:
        batch = filled(windows)
        if name == "swap in":
            batch.cache.swap_out("a")
            batch.cache.finish_swaps()
        if not interrupted(lambda batch=batch: call(batch, path), FILES, number):  # type: ignore[misc]
            break
        torn += not check_or_refused(batch)
        number += stride
    assert number > 50 and torn > 5


def test_an_interrupt_of_a_call_within_a_step_is_what_the_block_raises() -> None:
    batch = filled()
    with pytest.raises(KeyboardInterrupt), batch.extend(["a"]), batch.cache.changing:
        raise KeyboardInterrupt
    with pytest.raises(ConfigError, match="interrupt"):
        batch.cache.free("a")
