"""Layers with sliding windows in pages: what they see, which pages become free, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from invariants import check_invariants
from paged_cases import DIM, HEADS, PAGE, begin, extend, make, new_rows, poison, same, values
from paged_plans import PLANS, make_paged
from relative_l2 import relative_l2
from slow_cases import mark_slow

from kvquant import AttentionVariant
from kvquant.errors import CheckpointError, ConfigError
from kvquant.io.sequences import load_sequences, save_sequences
from kvquant.paged.batch import PagedBatch

LONG: dict[str, Any] = {"max_seq_len": 600, "num_pages": 60}
WINDOWS = [40, 20]


def states(batch: PagedBatch, ids: list[str], q: torch.Tensor, windows: Any) -> list[torch.Tensor]:
    """Outs and lses of all layers, each with its window."""
    found: list[torch.Tensor] = []
    with batch.extend(ids, 0):
        for layer, window in enumerate(windows):
            variant = AttentionVariant(window=window)
            found += batch.attend(layer, q, return_lse=True, variant=variant)
    return found


CASES = [(x, y) for x in ("no plan", "hadamard clip feedback") for y in ((3, 5), (0, 0))]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", mark_slow(CASES, [CASES[1], CASES[2]]), ids=str)
def test_each_layer_sees_its_window_whatever_free_pages_hold(
    case: tuple[str, tuple[int, int]], device: str
) -> None:
    """Beside a cache that keeps all pages, whose attention is told the windows."""
    (kind, lengths), limit = case, 1e-5 if device == "cpu" else 6e-3
    plan = PLANS.get(kind)
    windows = WINDOWS if plan is None else [40, 20, 33]
    kept: dict[str, Any] = {**LONG, "sink_len": lengths[0], "recent_len": lengths[1]}
    kept["device"] = device
    batches = [
        PagedBatch(make(**one) if plan is None else make_paged(plan, **one), 4, 600)
        for one in (kept, kept | {"windows": windows})
    ]
    whole, ours = batches

    def queries(*shape: int) -> torch.Tensor:
        q = torch.randn(shape, device=device)
        return q if device == "cpu" else q.bfloat16()

    for name in "ab":
        whole.cache.allocate(name)
        ours.cache.allocate(name)
    for counts in ([90, 200], [1, 1], [60, 7], [20, 100]):
        rows = new_rows(sum(counts), device)
        for batch in batches:
            extend(batch, ["a", "b"], counts, rows=rows)
        poison(ours.cache)
        check_invariants(ours.cache)
        q = queries(2, 2 * HEADS, DIM)
        expected = states(whole, ["a", "b"], q, windows)
        with ours.extend(["a", "b"], 0):
            found = [x for i in range(len(windows)) for x in ours.attend(i, q, return_lse=True)]
        for mine, other in zip(found, expected, strict=True):
            assert relative_l2(mine, other) < limit
        for name in "ab":
            pairs = zip(values(ours.cache, name), values(whole.cache, name), strict=True)
            for at, (mine, other) in enumerate(pairs):
                assert torch.equal(mine, other[:, -windows[at // 2] :])
    rows, q = new_rows(7, device), queries(2, 5, 2 * HEADS, DIM)
    outs = []
    for batch in batches:
        batch_windows = windows if batch is whole else [None] * len(windows)
        with batch.extend(["a", "b"], [5, 2]):
            for layer, window in enumerate(batch_windows):
                batch.append(layer, *rows)
                outs.append(batch.attend(layer, q, variant=AttentionVariant(window=window)))
    for mine, other in zip(outs[: len(windows)], outs[len(windows) :], strict=True):
        assert mine.any() and relative_l2(mine, other) < limit


def test_after_a_check_no_window_keeps_rows_to_be_found() -> None:
    batch = PagedBatch(make(num_pages=20, max_seq_len=900, windows=WINDOWS), 1, 300)
    cache = batch.cache
    begin(batch, "a", 250, range(250))
    assert cache.match_prefix(range(250)) > 0
    rows = new_rows(30)
    rows[0, 3] = torch.nan
    extend(batch, ["a"], 30, rows=rows)
    with pytest.raises(Exception, match="rows of K"):
        cache.check()
    check_invariants(cache)
    assert cache.match_prefix(range(250)) == 0
    for _ in range(2):
        extend(batch, ["a"], 150)
    with pytest.raises(ZeroDivisionError), batch.extend(["a"], 60):
        raise ZeroDivisionError
    cache.free("a")
    check_invariants(cache)
    assert cache.num_free_pages == 20


def test_a_failed_step_keeps_no_frames_of_the_pages_that_it_copied() -> None:
    options = {"windows": [None, 8], "sink_len": 0, "recent_len": 0, "chunk_len": PAGE}
    batch = PagedBatch(make(num_layers=2, **options), 2, 64)
    begin(batch, "a", PAGE + 1)
    batch.cache.fork("a", "b")
    with pytest.raises(ZeroDivisionError), batch.extend(["b"]):  # which copies the last page
        _ = 1 // 0
    for name in ("a", "b"):
        batch.cache.free(name)
    (window,) = batch.cache.state.pool.windows
    assert window.num_free == window.num_frames


def test_a_file_without_windows_is_read_into_a_cache_with_them(tmp_path: Path) -> None:
    path = tmp_path / "saved.safetensors"
    whole = PagedBatch(make(max_seq_len=200), 2, 190)
    begin(whole, "b", 190, range(190))
    save_sequences(whole.cache, ["b"], path)
    batch = PagedBatch(make(windows=[20, 40], max_seq_len=200), 2, 90, shared_prefix=True)
    load_sequences(batch.cache, path)
    poison(batch.cache)
    check_invariants(batch.cache)
    found, expected = values(batch.cache, "b"), values(whole.cache, "b")
    windows = [20, 20, 40, 40]
    assert same(found, [x[:, -w:] for x, w in zip(expected, windows, strict=True)])
    assert batch.cache.allocate("c", range(190)) == whole.cache.match_prefix(range(190)) > 0
    extend(batch, ["b"], 10)
    check_invariants(batch.cache)


def test_windows_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="windows has a length of 3 for 2 layers"):
        make(windows=[1, 2, 3])
    with pytest.raises(ConfigError, match="chunk_len 0 is not possible"):
        make(windows=WINDOWS, chunk_len=0)
    batch = PagedBatch(make(windows=WINDOWS), 2, 90)
    begin(batch, "a", 60)
    path = save_sequences(batch.cache, ["a"], tmp_path / "saved.safetensors")
    for windows in (None, [40, 21], [None, 20]):
        with pytest.raises(CheckpointError, match=r"windows is \[40, 20\] in the file and"):
            load_sequences(make(windows=windows), path)
