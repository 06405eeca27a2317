"""Layers with sliding windows in pages: what they see, which pages become free, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from invariants import check_invariants
from paged_cases import PAGE, begin, extend, make, new_rows, poison, same, values

from kvquant.errors import CheckpointError, ConfigError
from kvquant.io.sequences import load_sequences, save_sequences
from kvquant.paged.batch import PagedBatch

WINDOWS = [40, 20]


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
