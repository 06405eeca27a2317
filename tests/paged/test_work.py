"""What a step of a paged cache looks at on the host: what is in use, not what there is room for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from invariants import check_invariants
from paged_cases import DIM, begin, extend, make, new_rows, same, values
from torch_operations import Operations

from kvquant.errors import ConfigError
from kvquant.io.sequences import load_sequences, save_sequences
from kvquant.paged.batch import PagedBatch

ROOM = 1 << 20  # tokens that a sequence may have: 65,536 entries of a table


@pytest.mark.parametrize("shared", [True, False, None])
def test_a_step_looks_at_the_pages_in_use(shared: bool | None) -> None:
    cache = make(num_pages=40, max_seq_len=ROOM)
    batch = PagedBatch(cache, 4, 100, shared_prefix=shared)
    begin(batch, "a", 60, range(60))
    for name in "bc":
        cache.allocate(name, range(60))
        extend(batch, [name], 10)
    cache.state.tables[:, 8:] = -7  # behind the pages of all sequences
    rows, q = new_rows(3), torch.randn(3, 4, DIM)
    watch = Operations()
    with watch, batch.extend(list("abc")):
        for layer in range(cache.num_layers):
            batch.append(layer, *rows)
            batch.attend(layer, q)
    assert 0 < max(watch.sizes) < 10_000
    for name in ("block_table", "own_table", "prefix_table"):
        assert name not in batch._staged.tensors or not (batch._staged.tensors[name] == -7).any()


def test_tables_of_sequences_of_very_unlike_lengths_are_copied_row_by_row() -> None:
    """A block as wide as the longest would be 8 * 6,000 entries for 6,014 pages."""
    cache = make(num_pages=6100, max_num_seqs=8, max_seq_len=100_000, num_layers=1)
    batch, other = (PagedBatch(cache, 8, 96_000, shared_prefix=s) for s in (True, False))
    begin(batch, "long", 95_990)
    begin(batch, "a", 30)
    ids = ["a", "long", *range(6)]
    for i in range(6):
        cache.fork("a", i)
    width = len(cache.state.pool.block_table("long"))
    cache.state.tables[:, width:] = cache.state.tables[1:, 3:] = -7  # behind what is in use
    q, outs = torch.randn(8, 4, DIM), []
    for at in (batch, other):
        with at.extend(ids, 0):
            for i, name in enumerate(ids):
                table = cache.state.pool.block_table(name)
                assert at.block_table[i, : len(table)].tolist() == list(table)
            for name in ("block_table", "own_table"):
                assert not (at._staged.tensors.get(name, at.block_table) == -7).any()
            outs.append(at.attend(0, q))
    torch.testing.assert_close(*outs)


def test_sizes_beyond_the_memory_are_refused_before_any_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory that a system promised and does not have ends the process."""
    cache = make(max_num_seqs=1)
    batch = PagedBatch(cache, 4)
    taken: list[object] = []
    for name in ("zeros", "empty", "frombuffer"):
        monkeypatch.setattr(torch, name, lambda *args, **_: taken.append(args))
    for nbytes, call, words in (
        (cache.nbytes, lambda: make(max_num_seqs=1), "a cache of 12 pages and 1 sequence s"),
        (batch.nbytes, lambda: PagedBatch(cache, 4), "a batch takes"),
        (10**9, lambda: make(max_num_seqs=10**7, sink_len=0, recent_len=0), "the bookkeeping of"),
    ):
        monkeypatch.setattr("kvquant.cache.memory.available_memory", lambda most=nbytes: most - 100)
        with pytest.raises(ConfigError, match=rf"{words}.* GiB, more than there is: use"):
            call()
    assert not taken
    for options in ({"max_num_seqs": 2**31 - 1}, {"num_pages": 2**31 - 1}):
        with pytest.raises(ConfigError, match="GiB, more than there is"):
            make(**options)


@pytest.mark.parametrize("most", [60, 40])
def test_files_know_the_lengths_that_were_asked_for(most: int, tmp_path: Path) -> None:
    """A cache for more tokens reads them, and one for fewer if they are enough."""
    small = make(max_seq_len=60, sink_len=2, recent_len=100)
    large = make(max_seq_len=200, sink_len=2, recent_len=100)
    batch = PagedBatch(large, 4, 150)
    begin(batch, "a", 150, range(150))
    large.truncate("a", most)  # 48 are packed, and stay so
    path = save_sequences(large, ["a"], tmp_path / "x.safetensors")
    load_sequences(small, path)
    assert same(values(small, "a"), values(large, "a"))
    other = make(max_seq_len=200, sink_len=2, recent_len=100)
    load_sequences(other, save_sequences(small, ["a"], tmp_path / "y.safetensors"))
    batches = [PagedBatch(cache, 4, 150) for cache in (small, other)]
    rows = new_rows(60 - most)
    for at in batches:
        extend(at, ["a"], 60 - most, rows=rows)
        check_invariants(at.cache)
    assert same(values(small, "a"), values(other, "a"))
    assert (tmp_path / "x.safetensors").read_bytes() == (tmp_path / "y.safetensors").read_bytes()
