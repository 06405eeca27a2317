"""Layers with a sliding window: what they see, keep and forget (10 s)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from variant_cases import by_hand

from kvquant import AttentionVariant, KVCache, load_cache, save_cache
from kvquant.cache import layer
from kvquant.cache.layer import rooms_of
from kvquant.errors import CheckpointError, ShapeError, UnsupportedError
from kvquant.io.container import RowsFile
from kvquant.io.export import export_cache
from kvquant.io.manifest import CacheManifest
from kvquant.rows.spacing import spaced_len

BATCH, HEADS, DIM, MAX = 2, 2, 64, 64
WINDOW, SPARE = 12, 6


@pytest.fixture(autouse=True)
def few_rows_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that rings close in short tests."""
    monkeypatch.setattr(layer, "SPARE", SPARE)
    monkeypatch.setattr(layer, "spaced_len", lambda length, row_bytes: length)


def make(windows: list[int | None] | None = None, device: str = "cpu", **options: Any) -> KVCache:
    """One layer with a window and one without."""
    options = {"sink_len": 3, "recent_len": 4, "v_format": "int8", **options}
    windows = [WINDOW, None] if windows is None else windows
    return KVCache(len(windows), BATCH, HEADS, DIM, MAX, device=device, windows=windows, **options)


def tokens(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = torch.randn(2, BATCH, HEADS, count, DIM).bfloat16()
    return k, v


def fill(cache: KVCache, chunks: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Append random tokens in chunks to every layer; K and V of all."""
    parts = [tokens(count) for count in chunks]
    for k, v in parts:
        for index in range(cache.num_layers):
            cache.append(index, k, v)
    k_parts, v_parts = zip(*parts, strict=True)
    return torch.cat(k_parts, 2), torch.cat(v_parts, 2)


@settings(max_examples=15)
@given(st.data())
def test_several_queries_see_each_its_own_window(data: st.DataObject) -> None:
    """As of a layer that has all tokens and the window as a variant."""
    options: dict[str, Any] = {"sink_len": 0, "recent_len": data.draw(st.sampled_from([0, 1, 4]))}
    cache = make(**options)
    for count in (data.draw(st.integers(1, 30)), data.draw(st.integers(0, 8))):
        k, v = tokens(count)
        new_lens = [count, data.draw(st.integers(0, count))]
        for index in range(2):
            cache.append(index, k, v, new_lens)
    kept = [n - min(data.draw(st.integers(0, 2)), n) for n in cache.seq_lens.tolist()]
    cache.crop(kept)
    q_len = data.draw(st.sampled_from([1, 3]))
    k, v = tokens(q_len)
    q, q_lens = torch.randn(BATCH, q_len, 4, DIM), torch.tensor([q_len, 1], dtype=torch.int32)
    for index in range(2):
        cache.append(index, k, v, q_lens)
    slopes = -torch.rand(4)
    for window in (None, 5):
        mine = AttentionVariant(alibi_slopes=slopes, window=window)
        whole = mine._replace(window=window or WINDOW)
        found = cache.attend(0, q, q_lens, variant=mine, return_lse=True)
        expected = cache.attend(1, q, q_lens, variant=whole, return_lse=True)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    with pytest.raises(UnsupportedError, match="7 queries a sequence at most, not 8"):
        cache.attend(0, torch.randn(BATCH, 8, 4, DIM))


def test_queries_of_tokens_whose_window_is_gone_are_refused() -> None:
    cache = make([WINDOW])
    fill(cache, [40])
    cache.crop(36)
    cache.attend(0, torch.randn(BATCH, 3, 4, DIM))  # which see tokens from 22 on
    with pytest.raises(ShapeError, match=r"layer 0 has tokens from \[22, 22\] on, its queries see"):
        cache.attend(0, torch.randn(BATCH, 4, 4, DIM))


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_a_window_shows_the_last_tokens_of_an_unlimited_layer(data: st.DataObject) -> None:
    """Beside it a layer without a window, whose sinks are none, is given the same."""
    window = data.draw(st.sampled_from([1, 3, 5, 12, 100]), "window")
    recent_len = data.draw(st.sampled_from([0, 1, 4, 20]), "recent_len")
    recent = min(recent_len, window)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer, "SPARE", data.draw(st.sampled_from([1, 2, 6]), "spare"))
        cache = make([window], recent_len=recent_len)
    other = make([None], sink_len=0, recent_len=recent)
    q = torch.randn(BATCH, 2 * HEADS, DIM)
    for _ in range(data.draw(st.integers(1, 8), "chunks")):
        room = MAX - int(cache.seq_lens.max())
        count = data.draw(st.integers(0, min(room, 25)), "tokens")
        lens = data.draw(st.lists(st.integers(0, count), min_size=BATCH, max_size=BATCH), "lens")
        k, v = tokens(count)
        for one in (cache, other):
            one.append(0, k, v, lens)
        assert cache.seq_lens.tolist() == other.seq_lens.tolist()
        if not cache.layers[0].longest:
            continue
        expected = other.dequantized(0)
        for got, values in zip(cache.dequantized(0), expected, strict=True):
            for b, seq_len in enumerate(cache.seq_lens.tolist()):
                held = min(seq_len, window)
                assert torch.equal(got[b, :, :held], values[b, :, seq_len - held : seq_len])
                assert not got[b, :, held:].any()
        lens, variant = cache.seq_lens.tolist(), AttentionVariant(window=window)
        wanted = by_hand(q[:, None], *expected, lens, [1] * BATCH, variant)
        for found, exact in zip(cache.attend(0, q, return_lse=True), wanted, strict=True):
            torch.testing.assert_close(found.double(), exact[:, 0], rtol=1e-5, atol=1e-4)


def test_memory_is_that_of_the_window() -> None:
    assert rooms_of(64, 3, 4, None) == (3, 61, 4, 57), "all tokens may be rolled back"
    assert rooms_of(640, 3, 4, None) == (3, 637, 4, 64)
    assert rooms_of(64, 3, 4, 12, 5) == (0, 18, 4, 5)
    assert rooms_of(64, 3, 40, 12, 5) == (0, 18, 12, 5), "no more recent rows than the window has"
    assert rooms_of(10, 3, 4, 12, 7) == (0, 10, 4, 6), "nor packed ones than there are tokens"
    assert rooms_of(10, 3, 7, None) == (3, 0, 7, 0), "none is ever packed"
    assert rooms_of(64, 3, 0, None) == (3, 61, 0, 0), "nothing to roll back to"
    cache = make()
    assert [at.k_packed.shape[2] for at in cache.layers] == [18, 61]
    assert cache.windows == [12, None]


def test_a_ring_may_have_more_rows_than_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a cache has without the patch of these tests."""
    monkeypatch.setattr(layer, "spaced_len", spaced_len)
    cache = make()
    assert [at.k_packed.shape[2] for at in cache.layers] == [32, 64]
    cache = make(k_format="int8-g4", v_format="int8-g4")  # 80 bytes a row of K, and of V
    assert [at.k_packed.shape[2] for at in cache.layers] == [24, 64]
    fill(cache, [40, 17])
    cache.crop(45)  # by 12 tokens: the ring has 12 rows more than the window
    with pytest.raises(ShapeError, match="Keep 45 or more, or none"):
        cache.crop(44)


def test_crop_goes_back_as_far_as_there_are_rows() -> None:
    cache = make()
    fill(cache, [40])
    before = cache.dequantized(0)[0]
    with pytest.raises(
        ShapeError,
        match=r"cropped from 40 to 33 .*layer 0 sees the last 12 .*"
        r"before token 22. Keep 34 or more, or none",
    ):
        cache.crop(33)
    assert torch.equal(cache.dequantized(0)[0], before) and cache.seq_lens.tolist() == [40, 40]
    cache.crop([34, 40])
    with pytest.raises(ShapeError, match="cannot be cropped from 34 to 33"):
        cache.crop(33)
    cache.crop(0)
    fill(cache, [5])
    cache.crop(2)
    assert cache.seq_lens.tolist() == [2, 2]
    cache.reset()
    fill(cache, [40])
    cache.crop(36)


def test_a_window_as_long_as_the_cache_hides_no_token() -> None:
    cache = make([MAX], recent_len=MAX)
    fill(cache, [9])
    cache.crop(4)
    assert cache.seq_lens.tolist() == [4, 4]


@pytest.mark.parametrize("lens", [[40, 40], [40, 7], [5, 0]], ids=str)
def test_files_hold_the_window_and_go_on(tmp_path: Path, lens: list[int]) -> None:
    cache = make()
    for index in range(2):
        cache.append(index, *tokens(40), lens)
    cache.crop([max(n - 2, 0) for n in lens])
    save_cache(cache, tmp_path / "a.safetensors")
    loaded = load_cache(tmp_path / "a.safetensors")
    assert loaded.windows == [12, None]
    with RowsFile(tmp_path / "a.safetensors", CacheManifest) as file:
        kept = {part.kind: part.num_rows for part in file.contents.parts.values() if not part.layer}
    assert sum(kept.values()) == sum(min(max(n - 2, 0), WINDOW) for n in lens)
    for _ in range(2):
        assert loaded.seq_lens.tolist() == cache.seq_lens.tolist()
        for index in range(2):
            both = (one.dequantized(index) for one in (loaded, cache))
            assert all(map(torch.equal, *both))
        for index in range(2):
            k, v = tokens(12)
            cache.append(index, k, v)
            loaded.append(index, k, v)
    if lens[0] == 40:
        save_cache(loaded, tmp_path / "a.safetensors")
        again = load_cache(tmp_path / "a.safetensors", max_seq_len=80)
        assert torch.equal(again.dequantized(0)[0], loaded.dequantized(0)[0])
        with pytest.raises(ShapeError, match="cannot be cropped from 62 to 61"):
            again.crop([61, int(again.seq_lens[1])])


@pytest.mark.parametrize(
    ("windows", "recent_len", "new", "kept", "least"),
    [([WINDOW, None], 4, 40, 40, 40), ([WINDOW, None], 4, 40, 38, 38), ([WINDOW], 12, 18, 6, 13)],
    ids=["full", "cropped", "all packed"],
)
def test_the_room_that_a_file_needs_is_told(
    tmp_path: Path, windows: list[int | None], recent_len: int, new: int, kept: int, least: int
) -> None:
    """Where tokens are packed one must be able to leave the recent window."""
    cache, path = make(windows, recent_len=recent_len, rollback_len=0), tmp_path / "a.safetensors"
    fill(cache, [new])
    cache.crop(kept)
    save_cache(cache, path)
    with pytest.raises(CheckpointError, match=f"use at least {least}$"):
        load_cache(path, max_seq_len=least - 1)
    assert load_cache(path, max_seq_len=least).seq_lens.tolist() == [kept] * BATCH


def test_other_programs_get_no_part_of_a_sequence(tmp_path: Path) -> None:
    cache = make()
    fill(cache, [9])
    with pytest.raises(UnsupportedError, match="layer 0 has a sliding window of 12 tokens"):
        export_cache(cache, tmp_path / "a.safetensors", "bf16")


@pytest.mark.gpu
def test_a_ring_is_read_on_a_gpu() -> None:
    cache, other = make(device="cuda"), make()
    q = torch.randn(BATCH, 4 * HEADS, DIM).bfloat16()
    for count in (20, 1, 1, 14, 9, 1):
        k, v = tokens(count)
        for index in range(2):
            cache.append(index, k.cuda(), v.cuda())
            other.append(index, k, v)
            got, expected = cache.attend(index, q.cuda()), other.attend(index, q.float())
            assert isinstance(got, torch.Tensor) and isinstance(expected, torch.Tensor)
            torch.testing.assert_close(got.float().cpu(), expected, atol=0.03, rtol=0.03)
    cache.check()
    for one, two in zip(cache.layers, other.layers, strict=True):
        for name, tensor in one.tensors().items():
            assert torch.equal(tensor.cpu(), two.tensors()[name]), name
