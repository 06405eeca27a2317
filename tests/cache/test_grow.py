"""KVCache.grow: a cache goes on, bit for bit, as one that had the room at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_caches import rounding_basis

from kvquant import KVCache
from kvquant.cache import layer, row_stacks
from kvquant.errors import ConfigError, NonFiniteError, ShapeError

HEADS, DIM, MAX = 2, 64, 400
NAMES = "seq_lens", "packed_lens", "exact_lens", "starts", "exact_firsts", "seen_lens", "firsts"


KINDS: dict[str, dict[str, Any]] = {
    "default": {"sink_len": 3, "recent_len": 8},
    "windows": {"sink_len": 3, "recent_len": 8, "windows": [20, None]},
    "plan": {"sink_len": 3, "recent_len": 8, "bases": [rounding_basis()] * 2, "windows": [20, 90]},
    "many sinks": {"sink_len": 50, "recent_len": 2},
    "packed only": {"sink_len": 0, "recent_len": 0},
}


def make(kind: str, max_seq_len: int, device: str = "cpu") -> KVCache:
    options = {"k_format": "int4-g4", "v_format": "int8", "rollback_len": 16, **KINDS[kind]}
    return KVCache(2, 2, HEADS, DIM, max_seq_len, device=device, **options)


def append(caches: list[KVCache], counts: list[int]) -> None:
    k, v = torch.randn(2, 2, HEADS, max(counts), DIM, device=caches[0].device)
    new_lens = torch.tensor(counts, dtype=torch.int32, device=k.device)
    for cache in caches:
        for index in range(2):
            cache.append(index, k, v, new_lens)


def assert_alike(ours: KVCache, theirs: KVCache) -> None:
    """Lengths, rows that are read, and how far back rows are there."""
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        for name in NAMES if mine.window is not None else NAMES[:-1]:
            assert torch.equal(getattr(mine, name), getattr(other, name)), name
        values = mine.dequantized(torch.float32), other.dequantized(torch.float32)
        assert all(map(torch.equal, *values))


def grow_by_steps(kind: str, device: str) -> None:
    """From less room than the sinks to rings that have closed, with crops on both sides."""
    ours, theirs = make(kind, 2, device), make(kind, MAX, device)
    for room, counts, kept in (
        (2, [2, 1], [2, 0]),
        (9, [7, 9], [8, 5]),  # all tokens are sinks or recent
        (40, [32, 3], [30, 7]),
        (40, [1, 0], [31, 7]),
        (150, [100, 143], [120, 135]),
        (300, [60, 0], [170, 130]),
        (MAX, [230, 17], [390, 140]),
    ):
        ours.grow(room)
        assert ours.nbytes == make(kind, room, device).nbytes
        assert_alike(ours, theirs)
        append([ours, theirs], counts)
        for cache in (ours, theirs):
            cache.crop(torch.tensor(kept))
    assert_alike(ours, theirs)
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        assert mine.sizes == other.sizes and mine.split == other.split


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_that_grows_is_as_one_that_was_large(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer, "SPARE", 60)  # so that rings close
    grow_by_steps(kind, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_grows_on_a_gpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "SPARE", 60)
    grow_by_steps(kind, "cuda")


def test_what_is_beside_the_rows_stays() -> None:
    cache = make("default", 64)
    cache.start_positions[:] = torch.tensor([3, 5])
    cache.bad_rows[0], cache.overflow_tokens[0] = 2, 1
    cache.grow(100)
    assert cache.max_seq_len == 100 and cache.start_positions.tolist() == [3, 5]
    assert cache.bad_rows.tolist() == [2, 0] and cache.overflow_tokens.tolist() == [1]
    assert make("default", 100).nbytes == cache.nbytes == cache.fork().nbytes


@pytest.mark.parametrize("error", [ConfigError, KeyboardInterrupt])
def test_an_error_while_a_cache_grows_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    ours, theirs = make("windows", 64), make("windows", 64)
    append([ours, theirs], [60, 20])
    calls: list[str] = []

    def few_rows(shape: Any, device: Any, what: str, advice: str) -> torch.Tensor:
        calls.append(what)
        if len(calls) > 6:  # the first layer has four
            raise error(f"{what}: no memory")
        return row_stacks.zero_rows(shape, device, what, advice)

    monkeypatch.setattr(layer, "zero_rows", few_rows)
    with pytest.raises(error, match="no memory"):
        ours.grow(100)
    assert ours.max_seq_len == 64
    assert_alike(ours, theirs)
    with pytest.raises(ShapeError, match="would grow to 65 tokens, max_seq_len is 64"):
        append([ours], [5, 0])
    calls.clear()
    monkeypatch.undo()
    assert_alike(ours.fork(), theirs)  # its layers have other rooms now
    ours.grow(100)
    append([ours], [5, 0])
    assert ours.seq_lens.tolist() == [65, 20]


def test_a_failed_attempt_drops_what_each_layer_got_and_no_more() -> None:
    cache = KVCache(2, 1, 2, 64, 64, sink_len=0, recent_len=0)
    new = torch.randn(2, 1, 2, 10, 64)
    cache.append(0, *new)
    cache.append(1, *new[:, :, :, :5])
    with pytest.raises(KeyboardInterrupt), cache.attempt(5):
        cache.append(1, *new[:, :, :, 5:])
        raise KeyboardInterrupt
    assert [layer.seq_lens.tolist() for layer in cache.layers] == [[10], [5]]
    with pytest.raises(KeyboardInterrupt), cache.attempt(5):
        cache.crop(4)  # what the block does by itself stays so
        raise KeyboardInterrupt
    assert [layer.seq_lens.tolist() for layer in cache.layers] == [[4], [4]]
    for wrong in ("5", -1, None):
        with pytest.raises(ConfigError, match="new_tokens"), cache.attempt(wrong):  # type: ignore[arg-type]
            pass


def test_a_failed_attempt_takes_back_what_it_counted() -> None:
    cache = make("default", 64)
    cache.bad_rows[0] = 1  # from before
    with pytest.raises(KeyboardInterrupt), cache.attempt(3):
        append([cache], [3, 1])
        cache.bad_rows += 4
        cache.overflow_tokens += 5
        raise KeyboardInterrupt
    assert cache.seq_lens.tolist() == [0, 0]
    assert cache.bad_rows.tolist() == [1, 0] and not cache.overflow_tokens.any()
    with pytest.raises(NonFiniteError), cache.attempt(3):
        cache.check()  # has told it
    cache.check()
