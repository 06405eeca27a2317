"""How far apart the rows of sequences lie."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvquant import KVCache, LatentKVCache, RowFormat
from kvquant.errors import ShapeError
from kvquant.rows.spacing import APART, LINE, spaced_len


@given(st.integers(0, 1 << 20), st.lists(st.integers(1, 300).map(lambda n: 4 * n), max_size=2))
def test_rows_of_sequences_begin_with_lines_and_are_spread(length: int, rows: list[int]) -> None:
    spaced = spaced_len(length, rows)
    assert length <= spaced <= length + 64
    for each in rows:
        assert spaced * each % LINE == 0
        assert not spaced or not each % LINE or spaced * each % APART
    assert spaced_len(spaced, rows) == spaced


@pytest.mark.parametrize("name", ["int4", "int4-g4", "int4-g8", "int8", "int8-g4", "fp8", "bf16"])
def test_caches_have_such_rows(name: str) -> None:
    for max_seq_len in (300, 4096):
        cache = KVCache(1, 2, 2, 128, max_seq_len, k_format=name, v_format="int4")
        layer = cache.layers[0]
        for packed in (layer.k_packed, layer.v_packed):
            assert packed.stride(1) % LINE == 0 and packed.shape[2] >= max_seq_len - 4
            assert packed.stride(1) % APART or not packed.shape[3] % LINE
    assert cache.max_seq_len == 4096


def test_latent_rows_count_as_one() -> None:
    cache = LatentKVCache(1, 2, 1000, fmt="int4-g8+fp8-g4")
    assert cache.layers[0].k_packed.stride(0) % LINE == 0
    assert cache.layers[0].k_packed.shape[2] == 1000  # of 368 bytes, behind 4 sinks


def test_a_full_cache_has_no_room_for_more() -> None:
    cache = KVCache(1, 1, 1, 64, 41, k_format="int4", v_format="int4", sink_len=0, recent_len=0)
    k, v = torch.randn(2, 1, 1, 41, 64)
    cache.append(0, k, v)
    with pytest.raises(ShapeError, match="41"):
        cache.append(0, k[:, :, :1], v[:, :, :1])
    assert RowFormat.parse("int4", 64).row_bytes * cache.layers[0].packed_len % LINE == 0
