"""The reader of files of rows: which kinds it takes, and how its errors name the file (2 s)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from paged_cases import HEADS, PAGE, begin, make

from kvquant import KVCache, save_cache, save_sequences
from kvquant.errors import CheckpointError
from kvquant.io.container import RowsFile
from kvquant.io.manifest import CacheManifest, Manifest, SequencesManifest
from kvquant.io.parts import PagePart
from kvquant.paged.batch import PagedBatch


@pytest.fixture
def cache_file(tmp_path: Path) -> Path:
    cache = KVCache(1, 1, 2, 64, 40, sink_len=2, recent_len=4)
    cache.append(0, *torch.randn(2, 1, 2, 20, 64))
    return save_cache(cache, tmp_path / "cache.safetensors")


@pytest.fixture
def sequences_file(tmp_path: Path) -> Path:
    batch = PagedBatch(make(), 4, 100)
    begin(batch, "a", 60, range(60))
    return save_sequences(batch.cache, ["a"], tmp_path / "sequences.safetensors")


def test_a_reader_of_both_kinds_takes_each_as_what_it_is(
    cache_file: Path, sequences_file: Path
) -> None:
    kinds: dict[Path, type[Manifest]]
    kinds = {cache_file: CacheManifest, sequences_file: SequencesManifest}
    for path, kind in kinds.items():
        with RowsFile[Manifest](path, SequencesManifest, CacheManifest) as file:
            assert type(file.contents) is kind and file.path == path
            assert file.num_bytes == path.stat().st_size
            for part in file.contents.parts.values():
                assert file.rows(part).shape == part.shape


def test_files_of_the_other_kind_are_refused(cache_file: Path, sequences_file: Path) -> None:
    with pytest.raises(CheckpointError, match=r"this is a kvquant cache: load_cache reads it"):
        RowsFile(cache_file, SequencesManifest)
    with pytest.raises(CheckpointError, match=r"a paged cache: load_sequences reads it"):
        RowsFile(sequences_file, CacheManifest)


def test_pages_give_the_rows_in_use(sequences_file: Path) -> None:
    with RowsFile(sequences_file, SequencesManifest) as file:
        (sequence,) = file.contents.sequences
        pages = [part for part in file.contents.parts.values() if isinstance(part, PagePart)]
        for part in pages:
            rows = file.rows(part)
            assert rows.shape[:3] == (len(sequence.pages), HEADS, PAGE)
            used = part.in_use(rows)
            assert used.shape == (sequence.packed_len, HEADS, part.fmt.row_bytes)
            assert torch.equal(used[PAGE], rows[1, :, 0])


@pytest.mark.parametrize("text", ["is wrong", "{path} is wrong"])
def test_errors_that_leave_the_block_name_the_file_once(cache_file: Path, text: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        with RowsFile(cache_file, CacheManifest):
            raise CheckpointError(text.format(path=cache_file))
    assert str(caught.value).count(str(cache_file)) == 1
    with pytest.raises(ValueError, match=r"\Aanother\Z"):
        with RowsFile(cache_file, CacheManifest):
            raise ValueError("another")
