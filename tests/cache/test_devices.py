"""Devices: those that are not here, "meta", where a cache only tells its bytes, and memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvquant import KVCache, PagedKVCache, load_cache, save_cache
from kvquant.cache import memory
from kvquant.cache.checks import devices_of
from kvquant.cache.latent import LatentKVCache
from kvquant.errors import ConfigError, DeviceError, KVQuantError
from kvquant.rows.arguments import check_device

WRONG: list[tuple[Any, type[KVQuantError], str]] = [
    ("gpu", ConfigError, "device 'gpu' does not exist: use 'cpu' or 'cuda'"),
    ("", ConfigError, "device '' does not exist"),
    (None, ConfigError, "device None does not exist"),
    (1.5, ConfigError, "device 1.5 does not exist"),
    ("cuda:x", ConfigError, "device 'cuda:x' does not exist"),
    ("meta", DeviceError, "no kernel serves device 'meta': use 'cpu' or 'cuda'"),
    ("mps", DeviceError, "no kernel serves device 'mps': use 'cpu' or 'cuda'"),
    (torch.device("xpu", 1), DeviceError, "no kernel serves device 'xpu:1'"),
    ("cuda", DeviceError, "device 'cuda' cannot be used: torch"),
    ("cuda:3", DeviceError, "device 'cuda:3' cannot be used: torch"),
]


@pytest.mark.parametrize(("device", "error", "message"), WRONG, ids=str)
def test_a_cache_needs_a_device_that_is_there(
    device: Any, error: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # a machine without a GPU
    path = tmp_path / "cache.safetensors"
    save_cache(KVCache(1, 1, 1, 64, 8), path)
    makers: list[Callable[[], Any]] = [
        lambda: check_device(device),
        lambda: load_cache(path, device=device),
    ]
    if device != "meta":  # where they tell their bytes
        makers += [
            lambda: KVCache(1, 1, 1, 64, 8, device=device),
            lambda: PagedKVCache(1, 1, 64, 2, device=device),
        ]
    for make in makers:
        with pytest.raises(error, match=message):
            make()


def test_it_is_said_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(DeviceError, match=r"torch \S+ was built without CUDA"):
        check_device("cuda")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    with pytest.raises(DeviceError, match="finds no NVIDIA GPU with a driver"):
        check_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(DeviceError, match="there are 2 GPUs, the first one is cuda:0"):
        check_device("cuda:2")
    assert check_device("cuda:1") == torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert check_device("cuda") == torch.device("cuda:1")
    assert devices_of(["cuda", "cuda:1"], 2) == [torch.device("cuda:1")] * 2
    assert check_device(torch.device("cpu")) == torch.device("cpu")


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
    paged, latent = (MAKE[kind](device="meta") for kind in ("PagedKVCache", "LatentKVCache"))
    for call in (paged.check, lambda: paged.allocate("a"), latent.check):
        with pytest.raises(DeviceError, match="tells its nbytes alone"):
            call()
    assert not paged.ids
    with pytest.raises(KVQuantError):
        paged.dequantized("none", 0)


def test_a_machine_has_memory() -> None:
    available = memory.available_memory()
    assert available is None or 0 < available < 2**50


def test_only_a_cpu_is_asked_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 1 << 30)
    memory.check_room(1 << 30, torch.device("cpu"), "a cache", "use less")
    memory.check_room(1 << 40, torch.device("cuda"), "a cache", "use less")
    for device, nbytes in (("cpu", (1 << 30) + 1), ("cuda", (1 << 62) + 1)):
        with pytest.raises(ConfigError, match=r"a cache takes .* GiB, more than there is: use le"):
            memory.check_room(nbytes, torch.device(device), "a cache", "use less")
    monkeypatch.setattr(memory, "available_memory", lambda: None)  # it cannot be told
    memory.check_room(1 << 40, torch.device("cpu"), "a cache", "use less")
