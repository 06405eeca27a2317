"""Devices that there are, those that no kernel serves, and those that are not here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvquant import KVCache, PagedKVCache, load_cache, save_cache
from kvquant.cache.checks import devices_of
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


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(("device", "error", "message"), WRONG, ids=str)
def test_a_cache_needs_a_device_that_is_there(
    device: Any, error: type[KVQuantError], message: str, no_gpu: None, tmp_path: Path
) -> None:
    path = tmp_path / "cache.safetensors"
    save_cache(KVCache(1, 1, 1, 64, 8), path)
    makers: list[Callable[[], Any]] = [
        lambda: check_device(device),
        lambda: load_cache(path, device=device),
    ]
    if device != "meta":  # where they tell their bytes, see test_meta.py
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
