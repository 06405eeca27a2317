"""A cache on the meta device tells what it would take, and nothing else (1 s)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvquant import KVCache, PagedKVCache, save_cache
from kvquant.cache.latent import LatentKVCache
from kvquant.errors import ConfigError, DeviceError, KVQuantError

MAKE: dict[str, Callable[..., Any]] = {
    "KVCache": lambda **on: KVCache(2, 3, 2, 64, 512, k_format="int8", **on),
    "PagedKVCache": lambda **on: PagedKVCache(
        2, 2, 64, num_pages=4, max_num_seqs=2, max_seq_len=512, **on
    ),
    "LatentKVCache": lambda **on: LatentKVCache(2, 1, 512, latent_dim=512, rope_dim=64, **on),
}
K = torch.zeros(3, 2, 4, 64)
CALLS: dict[str, Callable[[Any], object]] = {
    "append": lambda cache: cache.append(0, K, K),
    "append on meta": lambda cache: cache.append(0, K.to("meta"), K.to("meta")),
    "step": lambda cache: cache.step(0, K[:, :, 0], K[:, :, :1], K[:, :, :1]),
    "attend": lambda cache: cache.attend(0, K[:, :, 0]),
    "check": lambda cache: cache.check(),
    "crop": lambda cache: cache.crop(0),
    "reset": lambda cache: cache.reset(),
    "select": lambda cache: cache.select([0, 1]),
    "reorder": lambda cache: cache.reorder([0, 1, 2]),
    "dequantized": lambda cache: cache.dequantized(0),
    "seq_lens": lambda cache: cache.seq_lens,
}


@pytest.mark.parametrize("kind", MAKE)
def test_bytes_are_those_of_the_same_cache_on_the_cpu(kind: str) -> None:
    assert MAKE[kind](device="meta").nbytes == MAKE[kind]().nbytes > 0


def test_a_cache_lies_there_as_a_whole() -> None:
    with pytest.raises(ConfigError, match="device lists 'meta' beside others"):
        KVCache(2, 3, 2, 64, 512, device=["cpu", "meta"])
    assert KVCache(2, 3, 2, 64, 512, device=["meta", "meta"]).nbytes


@pytest.mark.parametrize("call", CALLS)
def test_what_needs_tokens_is_refused(call: str) -> None:
    with pytest.raises(DeviceError, match="on device 'meta' holds no tokens and tells its nbytes"):
        CALLS[call](MAKE["KVCache"](device="meta"))


def test_nothing_is_saved_of_it_and_pages_refuse_too(tmp_path: Any) -> None:
    with pytest.raises(DeviceError, match="tells its nbytes alone"):
        save_cache(MAKE["KVCache"](device="meta"), tmp_path / "cache.safetensors")
    assert not [*tmp_path.iterdir()]
    paged = MAKE["PagedKVCache"](device="meta")
    with pytest.raises(DeviceError, match="tells its nbytes alone"):
        paged.check()
    with pytest.raises(DeviceError, match="tells its nbytes alone"):
        paged.allocate("a")
    assert not paged.ids
    with pytest.raises(DeviceError, match="tells its nbytes alone"):
        MAKE["LatentKVCache"](device="meta").check()
    with pytest.raises(KVQuantError):
        paged.dequantized("none", 0)
