"""KVCache over several devices: what one on a single device does, with each layer where it is told.

On the CPU alone "cpu:0" stands for another device: it has counters of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from devices import is_on
from relative_l2 import relative_l2
from slow_cases import mark_slow

from kvquant import KVCache, LatentKVCache, load_cache, save_cache
from kvquant.cache import contiguous
from kvquant.errors import ConfigError, NonFiniteError, ShapeError
from kvquant.rows.basis import Basis, LayerBasis

HEADS, DIM, BATCH = 2, 64, 3
DEVICES = [
    pytest.param(["cpu", "cpu:0", "cpu"], id="cpu"),
    pytest.param(["cuda:0", "cpu", "cuda:0"], id="cuda and cpu", marks=pytest.mark.gpu),
    pytest.param(["cpu", "cuda:0", "cuda:0"], id="cpu and cuda", marks=pytest.mark.gpu),
    pytest.param(["cuda:0", "cuda:1", "cuda:0"], id="two GPUs", marks=pytest.mark.gpu(2)),
]
several = pytest.mark.parametrize("devices", DEVICES)


def make(devices: list[str], max_seq_len: int = 200, **options: Any) -> tuple[KVCache, KVCache]:
    """One over several devices, and the same on the CPU."""
    options = {"v_format": "int8", "sink_len": 3, "recent_len": 8, **options}
    shape = len(devices), BATCH, HEADS, DIM, max_seq_len
    return KVCache(*shape, device=devices, **options), KVCache(*shape, **options)


def append(caches: tuple[KVCache, ...], new: int, counts: list[int] | None = None) -> None:
    k, v = torch.randn(2, len(caches[0].layers), caches[0].batch, HEADS, new, DIM).bfloat16()
    for cache in caches:
        for i, device in enumerate(cache.devices):
            cache.append(i, k[i].to(device), v[i].to(device), counts)


def assert_alike(spread: KVCache, single: KVCache, where: list[str]) -> None:
    """Lengths, positions and rows, and each layer on its device."""
    assert spread.seq_lens.tolist() == single.seq_lens.tolist()
    assert spread.positions.tolist() == single.positions.tolist()
    assert spread.positions.device == spread.layers[0].device
    for i, (mine, theirs) in enumerate(zip(spread.layers, single.layers, strict=True)):
        assert all(is_on(x.device, where[i]) for x in mine.tensors().values())
        assert mine.packed_lens.tolist() == theirs.packed_lens.tolist()
        for ours, expected in zip(spread.dequantized(i), single.dequantized(i), strict=True):
            assert (ours.cpu() - expected).norm() <= 1e-5 * expected.norm()
    spread.check()


@several
@pytest.mark.parametrize("windows", mark_slow([None, [30, None, 30]], [None]), ids=str)
def test_all_calls_do_what_they_do_on_one(
    devices: list[str], windows: list[int | None] | None
) -> None:
    spread, single = caches = make(devices, windows=windows)
    assert spread.devices == [torch.device(one) for one in devices]
    append(caches, 60, [60, 1, 25])
    append(caches, 1)
    assert_alike(*caches, devices)
    for cache in caches:
        cache.start_positions.copy_(torch.tensor([0, 5, 7]))
        cache.crop([50, 2, 26])
        cache.reorder([2, 0, 0])
    assert_alike(*caches, devices)
    append(caches, 100)
    forks = spread.fork([1, 0]), single.fork([1, 0])
    repeated = spread.repeat(2), single.repeat(2)
    for cache in caches:
        cache.grow(300)
    append(caches, 5)
    append(forks, 3)
    append(repeated, 2)
    for pair in (caches, forks, repeated):
        assert_alike(*pair, devices)
    with pytest.raises(KeyboardInterrupt), spread.attempt(20):
        k, v = torch.randn(2, BATCH, HEADS, 20, DIM).to(devices[1])
        spread.append(1, k, v)
        raise KeyboardInterrupt
    assert_alike(*caches, devices)
    for cache in caches:
        cache.reset()
    append(caches, 4)
    assert_alike(*caches, devices)


@several
def test_attention_and_steps(devices: list[str]) -> None:
    k_basis, v_basis = (Basis(torch.randn(HEADS, DIM)) for _ in "kv")
    spread, single = caches = make(devices, bases=[LayerBasis(k_basis, v_basis)] * 3)
    append(caches, 70, [70, 1, 33])
    # bfloat16 is rounded to three times there, 2.1e-3 each: rotated queries, what is in the basis,
    # and the result
    limit = 6.3e-3 if "cuda:0" in devices else 3e-3
    for q_len in (1, 3):
        axes = (q_len, 8) if q_len > 1 else (8,)
        q = torch.randn(BATCH, *axes, DIM).bfloat16()
        k, v = torch.randn(2, BATCH, HEADS, q_len, DIM).bfloat16()
        for i, device in enumerate(devices):
            found = spread.step(i, *(x.to(device) for x in (q, k, v)))
            expected = single.step(i, q.float(), k, v)
            assert is_on(found.device, device)
            assert relative_l2(found.cpu(), expected) < limit
            found = spread.attend(i, q.to(device))
            assert relative_l2(found.cpu(), single.attend(i, q.float())) < limit
    assert_alike(*caches, devices)


@several
def test_counters_of_all_devices_are_read_and_set_back(devices: list[str]) -> None:
    spread, _ = make(devices)
    assert len({counter.data_ptr() for i in range(3) for counter in spread.counters_of(i)}) == 4
    for i, (row, name) in enumerate(((0, "1 rows of K and 0 of V"), (1, "0 rows of K and 1 of V"))):
        spread.counters_of(i)[0][row] += 1
        with pytest.raises(NonFiniteError, match=name):
            spread.check()
        spread.check()
    for i in range(2):
        spread.counters_of(i)[1][0] += 2
    with pytest.raises(ShapeError, match="4 tokens"):
        spread.check()
    spread.check()
    spread.counters_of(1)[0][0] = 1
    with pytest.raises(KeyboardInterrupt), spread.attempt(1):
        spread.counters_of(1)[0][0] += 5
        spread.counters_of(0)[1][0] += 5
        raise KeyboardInterrupt
    assert spread.counters_of(1)[0].tolist() == [1, 0] and not spread.overflow_tokens.any()
    spread.reset()
    spread.check()
    k, v = torch.randn(2, BATCH, HEADS, 2, DIM).to(devices[1])
    spread.append(1, k, v, [0, 2, 1])
    with pytest.raises(ShapeError, match="of sequence 1 layer 0 has 0 tokens and layer 1 2"):
        spread.check()


@several
def test_one_file_for_all_devices(devices: list[str], tmp_path: Path) -> None:
    spread, single = caches = make(devices)
    append(caches, 60, [60, 1, 25])
    for name, cache in (("spread", spread), ("single", single)):
        save_cache(cache, tmp_path / f"{name}.safetensors", creation={})
    files = [(tmp_path / f"{name}.safetensors").read_bytes() for name in ("spread", "single")]
    assert files[0] == files[1]
    for where in (devices, "cpu"):
        loaded = load_cache(tmp_path / "spread.safetensors", device=where)
        again = single.fork(), loaded
        append((single, loaded), 30)
        assert_alike(loaded, single, devices if where is devices else ["cpu"] * 3)
        single = again[0]
    with pytest.raises(ConfigError, match="device lists 2 devices for 3 layers"):
        load_cache(tmp_path / "spread.safetensors", device=devices[:2])


def test_it_says_where_it_lies() -> None:
    assert repr(make(["cpu", "cpu:0", "cpu"])[0]).endswith("on cpu and cpu:0)")
    assert repr(make(["cpu"] * 3)[0]).endswith("on cpu)")


def test_memory_is_looked_for_on_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: dict[str, int] = {}

    def note(nbytes: int, device: torch.device, *_: str) -> None:
        noted[str(device)] = nbytes

    monkeypatch.setattr(contiguous, "check_room", note)
    monkeypatch.setattr(contiguous, "_LARGE", 0)

    def new(devices: list[str], k_format: list[str], max_seq_len: int = 64) -> KVCache:
        noted.clear()
        shape = len(devices), BATCH, HEADS, DIM, max_seq_len
        return KVCache(*shape, device=devices, k_format=k_format)

    def taken(k_format: list[str], max_seq_len: int = 64) -> int:
        """Bytes of a cache of these layers on one device."""
        new(["cpu"] * len(k_format), k_format, max_seq_len)
        return noted["cpu"]

    first, second = ["int8", "bf16"], ["int4-g4"]  # three sizes
    assert taken(first) > taken(second) > 0
    small = {"cpu": taken(first), "cpu:0": taken(second)}
    large = {"cpu": taken(first, 128), "cpu:0": taken(second, 128)}
    largest = taken(["bf16"])
    cache = new(["cpu", "cpu:0", "cpu"], ["int8", "int4-g4", "bf16"])
    assert noted == small
    noted.clear()
    cache.repeat(3)
    assert noted == {device: 3 * nbytes for device, nbytes in small.items()}
    noted.clear()
    cache.grow(128)  # the largest layer is there twice for a time
    assert noted == {device: large[device] - small[device] + largest for device in small}


@several
def test_latent_rows_over_several_devices(devices: list[str]) -> None:
    spread, single = (LatentKVCache(3, 2, 64, device=one) for one in (devices, "cpu"))
    latent, rope = torch.randn(2, 1, 5, 512), torch.randn(2, 1, 5, 64)
    for i, device in enumerate(devices):
        spread.append(i, latent.to(device), rope.to(device))
        single.append(i, latent, rope)
    for cache in (spread, spread.fork([1, 0]).fork([1, 0])):
        cache.check()
        for i, device in enumerate(devices):
            assert is_on(cache.layers[i].device, device)
            for found, expected in zip(cache.dequantized(i), single.dequantized(i), strict=True):
                assert torch.equal(found.cpu(), expected)
