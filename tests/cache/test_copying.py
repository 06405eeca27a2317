"""Caches that are copied and pickled: a KVCache is another one, a paged cache refuses."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from paged_cases import begin, make, same, seen, values

from kvquant import KVCache, LatentKVCache
from kvquant.errors import UnsupportedError
from kvquant.paged.batch import PagedBatch


def by_torch(x: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "torch.save": by_torch,
}


def test_a_shallow_copy_of_a_cache_is_refused() -> None:
    sizes: dict[str, Any] = {"num_layers": 1, "batch": 1, "max_seq_len": 8}
    for cache in (KVCache(num_kv_heads=1, head_dim=64, **sizes), LatentKVCache(**sizes)):
        with pytest.raises(UnsupportedError, match=r"Cache would share its rows, .*copy\.deepcopy"):
            copy.copy(cache)


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_of_a_kv_cache_goes_on_by_itself(way: str) -> None:
    cache = KVCache(2, 2, 2, 64, 60, v_format="int8", sink_len=2, recent_len=8, windows=[None, 20])
    for layer in range(2):
        cache.append(layer, *torch.randn(2, 2, 2, 40, 64))
    cache.start_positions[1] = 7
    rows, q = torch.randn(2, 2, 2, 10, 64), torch.randn(2, 4, 64)
    for layer in range(2):
        cache.append(layer, *rows[:, :, :, :1])
        assert cache.layers[layer].bound, "the next such append is by the same launches"
    copied, before = WAYS[way](cache), [cache.dequantized(layer) for layer in range(2)]
    for layer in range(2):
        for new in rows[:, :, :, 1:].split([1, 8], 3):
            copied.append(layer, *new)
            assert same(cache.dequantized(layer), before[layer])
        cache.append(layer, *rows[:, :, :, 1:])
        assert torch.equal(cache.attend(layer, q), copied.attend(layer, q))
        assert same(cache.dequantized(layer), copied.dequantized(layer))
    assert copied.positions.tolist() == cache.positions.tolist() == [50, 57]


@pytest.mark.parametrize("way", [*WAYS, "copy", "process"])
@pytest.mark.parametrize(
    "part",
    [
        lambda batch: batch,
        lambda batch: batch.cache,
        lambda batch: [batch.cache, batch],
        lambda batch: batch.cache.rows,
        lambda batch: batch.cache.rows.pages[0],
        lambda batch: batch.cache.state,
        lambda batch: batch.cache.swap_space,
        lambda batch: batch._staged,
    ],
)
def test_a_paged_cache_and_its_parts_are_not_copied(
    part: Callable[[PagedBatch], Any], way: str
) -> None:
    batch = PagedBatch(make(), 2, 60)
    begin(batch, "a", 50, range(50))
    before, rows, x = seen(batch.cache), values(batch.cache, "a"), part(batch)
    with pytest.raises(UnsupportedError, match=r"save_sequences .*fork copies one"):
        if way == "process":
            process = multiprocessing.get_context("spawn").Process(target=print, args=(x,))
            process.start()
        elif way == "copy":
            copy.copy(x[0] if isinstance(x, list) else x)
        else:
            WAYS[way](x)
    assert seen(batch.cache) == before
    assert same(values(batch.cache, "a"), rows)
