"""Saved and loaded caches: round trips, golden files, refusals."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from forged import forge, manifest_of, write
from safetensors.torch import load_file, save_file
from saved_kinds import contents

from kvquant import KVCache, LatentKVCache, PagedKVCache, RowFormat
from kvquant.errors import CheckpointError, ConfigError, ShapeError
from kvquant.io.checkpoint import load_cache, save_cache
from kvquant.io.export import export_cache, quantize_raw
from kvquant.io.inspect import describe
from kvquant.io.model_id import model_identity
from kvquant.io.plan import CachePlan
from kvquant.io.sequences import load_sequences

CONFIG = {"model_type": "llama", "hidden_size": 256, "rope_parameters": {"rope_theta": 10000.0}}
DATA = Path(__file__).parents[1] / "data"
ROWS: dict[str, Any] = {"k_format": "int4-g4", "v_format": "int4-g4"}


def make_cache(
    seed: int = 0, lens: tuple[int, ...] = (23, 9), max_seq_len: int = 40, **options: Any
) -> KVCache:
    """Two layers with tokens that arrived in two chunks, the sequences being of unequal lengths."""
    options = ROWS | {"sink_len": 2, "recent_len": 6} | options
    cache = KVCache(2, len(lens), 2, 64, max_seq_len, **options)
    cache.start_positions.copy_(torch.arange(len(lens)) * 100 + seed)
    append_random(cache, seed, tuple(n // 2 for n in lens))
    append_random(cache, seed + 1, tuple(n - n // 2 for n in lens))
    return cache


def append_random(cache: KVCache, seed: int, lens: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(seed)
    for i, layer in enumerate(cache.layers):
        k, v = (
            torch.randn(
                cache.batch, cache.num_kv_heads, max(lens), fmt.head_dim, generator=generator
            )
            for fmt in (layer.k_format, layer.v_format)
        )
        cache.append(i, k, v, lens)


def assert_continues_alike(first: KVCache, second: KVCache, steps: int = 9) -> None:
    """Token after token both hold the same bytes and attend alike."""
    for step in range(steps):
        for cache in (first, second):
            append_random(cache, 1000 + step, (1,) * cache.batch)
        q = torch.randn(first.batch, 4, first.layers[0].k_format.head_dim)
        for layer in range(first.num_layers):
            outs = [cache.attend(layer, q, backend="reference") for cache in (first, second)]
            assert torch.equal(*outs)
        assert contents(first) == contents(second)


SAVED: list[dict[str, Any]] = [{}, {"sink_len": 0, "recent_len": 0}]
SAVED += [{"sink_len": 50}, {"recent_len": 50}, {"lens": (0, 0)}, {"lens": (0, 40, 1, 7, 8, 9)}]
SAVED += [{"k_format": ["int8", "int4-g8"]}, {"v_format": RowFormat("int4", 4, 128)}]
SAVED += [{"k_format": "fp8", "v_format": "fp8-g4", "exact_format": "fp16"}]
NAMES = ("int8-g2", "int4"), ("int3", "int2"), ("bf16", "fp16")
SAVED += [{"k_format": k, "v_format": v} for k, v in NAMES]


@pytest.mark.parametrize("options", SAVED, ids=str)
def test_loaded_cache_is_the_saved_one_and_continues(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    cache = make_cache(max_seq_len=56 if "lens" in options else 40, **options)
    assert save_cache(cache, tmp_path / "c.safetensors") == tmp_path / "c.safetensors"
    loaded = load_cache(tmp_path / "c.safetensors")
    assert contents(loaded) == contents(cache)
    assert loaded.max_seq_len == cache.max_seq_len
    assert loaded.nbytes == cache.nbytes
    assert_continues_alike(loaded, cache)


def test_cropped_caches_keep_what_is_packed(tmp_path: Path) -> None:
    cache = make_cache(rollback_len=0)
    append = torch.randn(2, 2, 3, 64)
    cache.append(0, append, append)  # layer 0 packs ahead of layer 1, then is cropped back
    cache.crop([12, 8])
    packed = [layer.packed_lens.tolist() for layer in cache.layers]
    assert packed[0] != packed[1]
    save_cache(cache, tmp_path / "c.safetensors")
    assert_continues_alike(load_cache(tmp_path / "c.safetensors"), cache)


@pytest.mark.parametrize("saved, loaded", [(40, 64), (40, 23), (23, 40), (64, 24)])
def test_another_max_seq_len_is_as_if_made_with_it(tmp_path: Path, saved: int, loaded: int) -> None:
    save_cache(make_cache(max_seq_len=saved, recent_len=30), tmp_path / "c.safetensors")
    cache = load_cache(tmp_path / "c.safetensors", max_seq_len=loaded)
    other = make_cache(max_seq_len=loaded, recent_len=30)
    assert cache.max_seq_len == loaded and cache.nbytes == other.nbytes
    assert_continues_alike(cache, other, steps=loaded - 23)


def test_too_small_max_seq_len_is_refused_with_one_that_fits(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    cache = make_cache()
    save_cache(cache, path)
    with pytest.raises(CheckpointError, match="max_seq_len 22: use at least 23"):
        load_cache(path, max_seq_len=22)
    with pytest.raises(ConfigError, match="max_seq_len -1"):
        load_cache(path, max_seq_len=-1)
    cache.crop(10)
    save_cache(cache, path)
    with pytest.raises(CheckpointError, match="max_seq_len 9: use at least 10"):
        load_cache(path, max_seq_len=9)
    assert contents(load_cache(path, max_seq_len=10)) == contents(cache)


def test_file_is_plain_safetensors_and_holds_used_tokens_only(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    save_cache(make_cache(lens=(23, 9), v_format="int8"), path, creation={"prompt": "a.txt"})
    tensors = load_file(path)
    assert {name: list(t.shape) for name, t in tensors.items() if name.startswith("layers.1.")} == {
        "layers.1.k_sinks": [4, 2, 128],
        "layers.1.k_packed": [16, 2, 48],
        "layers.1.k_recent": [12, 2, 128],
        "layers.1.v_sinks": [4, 2, 128],
        "layers.1.v_packed": [16, 2, 68],
        "layers.1.v_recent": [12, 2, 128],
    }
    manifest = manifest_of(path)
    assert manifest["creation"] == {"prompt": "a.txt"}
    assert manifest["positions"] == [23, 109]
    # the ring is written in the order of the tokens, not of its slots
    k, _ = make_cache(v_format="int8").dequantized(1, torch.bfloat16)
    assert tensors["layers.1.k_recent"].view(torch.bfloat16)[:6].transpose(0, 1).equal(k[0, :, 17:])


def ramp(tokens: int, *shape: int) -> torch.Tensor:
    """Values of golden files: token + element / 4 - 8."""
    return (torch.arange(tokens)[:, None] + torch.arange(64) / 4 - 8.0).expand(*shape, tokens, 64)


def golden_cache() -> KVCache:
    formats: dict[str, Any] = {"k_format": ["int4-g4", "int8"], "v_format": ["int4", "int8"]}
    cache = KVCache(2, 2, 2, 64, 16, sink_len=2, recent_len=3, **formats)
    cache.start_positions.copy_(torch.tensor([0, 7]))
    for layer in range(2):
        cache.append(layer, ramp(11, 2, 2), -ramp(11, 2, 2), [11, 5])
    return cache


def golden_windows() -> KVCache:
    options: dict[str, Any] = {"k_format": "int8-g2", "v_format": ["fp8", "int4"], "sink_len": 1}
    cache = KVCache(2, 2, 1, 64, 48, recent_len=3, windows=[8, None], **options)
    for layer in range(2):
        cache.append(layer, ramp(40, 2, 1), -ramp(40, 2, 1), [40, 11])
    return cache


def golden_rollback() -> KVCache:
    cache = KVCache(1, 1, 1, 64, 48, k_format="int8", sink_len=1, recent_len=3, rollback_len=5)
    cache.append(0, ramp(20, 1, 1), -ramp(20, 1, 1))
    return cache


LATENT = (torch.arange(12)[:, None] / 4 + torch.arange(256) / 64 - 2.0).expand(1, 1, 12, 256)
ROPE = (torch.arange(12)[:, None] / 4 - torch.arange(32) / 8).expand(1, 1, 12, 32)


def golden_latent() -> KVCache:
    dims = {"latent_dim": 256, "rope_dim": 32}
    options: dict[str, Any] = {"sink_len": 1, "recent_len": 3, "rollback_len": 5, **dims}
    cache = LatentKVCache(2, 1, 32, fmt=["int4-g8+fp8-g4", "int8-g4"], **options)
    for layer in range(2):
        cache.append(layer, LATENT, ROPE)
    return cache


@pytest.mark.parametrize(
    "name, model, make",
    [
        ("cache", CONFIG, golden_cache),
        ("cache-windows", {"model_type": "llama"}, golden_windows),
        ("cache-rollback", {"model_type": "llama"}, golden_rollback),
        ("cache-latent", {"model_type": "deepseek_v3"}, golden_latent),
    ],
)
def test_golden_files_still_load(
    name: str, model: dict[str, Any], make: Callable[[], KVCache], tmp_path: Path
) -> None:
    fresh = make()
    written = save_cache(fresh, tmp_path / "again.safetensors", model=model)
    for path in (DATA / f"{name}.safetensors", written):
        cache = load_cache(path, model=model)
        assert type(cache) is type(fresh) and contents(cache) == contents(fresh)
        assert (cache.rollback_len, cache.windows) == (fresh.rollback_len, fresh.windows)
        for layer in range(cache.num_layers):
            sides = zip(cache.dequantized(layer), fresh.dequantized(layer), strict=True)
            assert all(torch.equal(ours, theirs) for ours, theirs in sides)


def test_the_golden_file_of_a_plan_of_latent_rows_still_loads() -> None:
    plan, path = CachePlan.load(DATA / "plan-latent.safetensors"), DATA / "cache-latent-plan"
    cache = load_cache(
        path.with_suffix(".safetensors"), model={"model_type": "deepseek_v3"}, plan=plan
    )
    assert isinstance(cache, LatentKVCache) and [*map(str, cache.formats)] == ["int4-g8+int8-g4"]
    assert cache.bases is not None and cache.bases[0].v.kind == "matrix"
    for ours, wanted in zip(cache.dequantized(0), (LATENT, ROPE), strict=True):
        assert (ours - wanted).abs().max() < 0.05


READERS = load_cache, CachePlan.load, describe, partial(load_sequences, PagedKVCache(1, 1, 64, 1))


@pytest.mark.parametrize("key", ["kvquant_cache", "kvquant_pages", "kvquant", "kvquant_moments"])
@pytest.mark.parametrize("read", READERS, ids=["cache", "plan", "describe", "sequences"])
def test_files_of_before_the_first_release_are_refused(
    tmp_path: Path, key: str, read: Callable[[Path], object]
) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.zeros(1)}, path, {key: "{}", f"{key}_sha256": "0" * 64})
    with pytest.raises(CheckpointError, match="before its first release: write it again") as caught:
        read(path)
    assert str(caught.value).startswith(str(path))


def test_layers_in_the_middle_of_a_step_are_not_saved(tmp_path: Path) -> None:
    cache = make_cache()
    x = torch.randn(2, 2, 1, 64)
    cache.append(0, x, x)
    with pytest.raises(ShapeError, match="append this step's tokens to every layer"):
        save_cache(cache, tmp_path / "c.safetensors")
    assert not list(tmp_path.iterdir())


def test_arguments_that_make_no_file_are_refused(tmp_path: Path) -> None:
    cache = make_cache()
    with pytest.raises(ConfigError, match=r"NAME\.safetensors"):
        save_cache(cache, tmp_path / "c.bin")
    calls: list[Callable[[Any], object]] = [
        partial(save_cache, cache),
        load_cache,
        CachePlan.load,
        quantize_raw,
        describe,
        partial(export_cache, cache, to="bf16"),
    ]
    for call in calls:
        for odd_path in (None, b"c.safetensors", 3):
            with pytest.raises(ConfigError, match=r"path is .*: give a string or a Path"):
                call(odd_path)
    assert not list(tmp_path.iterdir())


def test_cache_of_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    save_cache(make_cache(), path, model=CONFIG)
    load_cache(path)
    load_cache(path, model={**CONFIG, "torch_dtype": "float16", "_name_or_path": "elsewhere"})
    with pytest.raises(CheckpointError, match=r"to a 'llama' model .* not to this 'qwen2'"):
        load_cache(path, model={**CONFIG, "model_type": "qwen2"})
    odd: list[Any] = ["llama", [], 5, {"x": object()}]
    for config in odd:
        for call in (partial(save_cache, make_cache()), load_cache):
            with pytest.raises(ConfigError, match=r"pass config\.to_dict\(\)"):
                call(path, model=config)
    save_cache(make_cache(), path)
    with pytest.raises(CheckpointError, match="does not say which model"):
        load_cache(path, model=CONFIG)


def test_model_identity_ignores_what_does_not_change_keys_and_values() -> None:
    nested = {"model_type": "vlm", "text_config": {"dtype": "bfloat16", "hidden_size": 8}}
    same = {"text_config": {"hidden_size": 8.0, "_x": 1, "new": None}, "model_type": "vlm"}
    other = {"model_type": "vlm", "text_config": {"hidden_size": 16}}
    assert model_identity(nested) == model_identity(same)
    assert model_identity(nested)["type"] == "vlm"
    assert model_identity(nested)["sha256"] != model_identity(other)["sha256"]


def test_values_that_are_not_finite_are_named(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    nan, negative = (list(struct.pack("<e", x)) for x in (float("nan"), -1.0))
    places = [  # (tensor, row in it, byte, what to write, message)
        ("layers.1.v_packed", 16, 4, nan, "layer 1, V, sequence 1, token 3, KV head 1: a scale"),
        ("layers.0.k_packed", 2, 6, nan, "layer 0, K, sequence 0, token 4, KV head 1: a scale"),
        ("layers.0.k_packed", 2, 8, negative, "token 4, KV head 1: a scale is negative"),
        ("layers.0.k_recent", 6, 10, [0x80, 0xFF], "K, sequence 1, token 4, .* a value is NaN"),
    ]
    for name, row, byte, value, message in places:
        save_cache(make_cache(lens=(23, 10)), path)
        tensors = load_file(path)
        tensors[name][row, 1, byte : byte + 2] = torch.tensor(value, dtype=torch.uint8)
        top = manifest_of(path)
        write(path, top, tensors)
        with pytest.raises(CheckpointError, match="checksum differs"):
            load_cache(path)
        del top["sha256"]
        write(path, top, tensors)
        with pytest.raises(CheckpointError, match=message):
            load_cache(path)


def put(rows: torch.Tensor, value: float) -> None:
    """Let 16-bit rows, bf16, hold a value."""
    rows.view(torch.bfloat16).fill_(value)


@pytest.mark.parametrize("value", [65536.0, -1e5, 3e38])
def test_rows_that_cannot_be_packed_are_refused(tmp_path: Path, value: float) -> None:
    """They would become NaN when they leave the recent window; sinks never do."""
    path, bad = tmp_path / "c.safetensors", tmp_path / "bad.safetensors"
    cache = make_cache(v_format="bf16")
    put(cache.layers[1].k_sinks[1, 1], value)
    put(cache.layers[1].v_recent[0], value)  # it is packed as bf16
    put(cache.layers[0].k_recent[:, :, 1], 65280.0)  # the largest of bf16 that fp16 holds
    save_cache(cache, path)
    assert contents(load_cache(path)) == contents(cache)
    cache.append(0, *torch.zeros(2, 2, 2, 6, 64))
    cache.append(1, *torch.zeros(2, 2, 2, 6, 64))
    assert all(x.isfinite().all() for layer in (0, 1) for x in cache.dequantized(layer))

    message = "layer 1, K, sequence 1, token 4, KV head 0: a value is too large for int4-g4 rows"
    cache = load_cache(path)
    put(cache.layers[1].k_recent[1, 0, 2], value)  # of 9 tokens, 7 of them after the sinks
    with pytest.raises(CheckpointError, match=message):
        save_cache(cache, bad)
    assert not bad.exists()
    save_cache(load_cache(path), bad)
    forge(bad, lambda _, tensors: put(tensors["layers.1.k_recent"][7, 0], value))
    with pytest.raises(CheckpointError, match=message):
        load_cache(bad)


@pytest.mark.parametrize("position", [-(2**63), -1, 2**63 - 1 - 23])
def test_positions_of_64_bits_are_saved_and_loaded(tmp_path: Path, position: int) -> None:
    cache = make_cache()
    cache.start_positions.fill_(position)
    save_cache(cache, tmp_path / "c.safetensors")
    loaded = load_cache(tmp_path / "c.safetensors")
    assert loaded.start_positions.tolist() == [position] * 2
    assert loaded.positions.tolist() == [position + 23, position + 9]
    cache.start_positions.fill_(2**63 - 1 - 22)
    with pytest.raises(CheckpointError, match=r"positions\[0\] is 9223372036854775808"):
        save_cache(cache, tmp_path / "c.safetensors")


def test_a_plan_of_another_shape_is_refused(tmp_path: Path) -> None:
    """Offsets of zeros have one fingerprint in all shapes."""
    path = tmp_path / "c.safetensors"

    def plan(heads: int, dim: int) -> CachePlan:
        side = {"format": "int4", "basis": "none", "rounding": "nearest"}
        facts = {"layers": [{"k": side, "v": side, "kept": None}]}
        return CachePlan(facts, {f"{side}.offset": torch.zeros(1, heads, dim) for side in "kv"})

    save_cache(KVCache.from_plan(plan(2, 64), 1, 8), path)
    load_cache(path, plan=plan(2, 64))
    with pytest.raises(CheckpointError, match="in the bases of another plan: load it"):
        load_cache(path, plan=plan(1, 128))


def test_what_cannot_be_loaded_is_not_saved(tmp_path: Path) -> None:
    path, cache = tmp_path / "c.safetensors", KVCache(1, 1, 1, 64, 1)
    save_cache(cache, path)
    before = path.read_bytes()
    odd: list[Any] = [{"a": [[]] * (1 << 20)}, {1: 0, "1": 1}, {"a": float("inf")}, [1]]
    for creation in odd:
        with pytest.raises(ConfigError, match="creation is not plain data"):
            save_cache(cache, path, creation=creation)
    with pytest.raises(CheckpointError, match=r"layers .* length <= 4096"):
        save_cache(KVCache(4097, 1, 1, 64, 0), path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("limit", ["schema.MAX_LISTS", "tensor_files.MAX_HEADER_BYTES"])
def test_what_is_saved_at_a_limit_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    path, cache = tmp_path / "c.safetensors", make_cache()
    save_cache(cache, path)
    saved = []
    for most in range(12, 62, 2) if "LISTS" in limit else range(1500, 6500, 250):
        monkeypatch.setattr(f"kvquant.io.{limit}", most)
        try:
            save_cache(cache, path)
            saved.append(True)
        except (CheckpointError, ConfigError):
            saved.append(False)
            monkeypatch.undo()
        assert contents(load_cache(path)) == contents(cache)
    assert saved == sorted(saved) and {True, False} == set(saved)


def test_fp8_codes_that_are_nan_are_refused_when_saving(tmp_path: Path) -> None:
    cache = make_cache(k_format="fp8")
    cache.layers[1].k_packed[0, 1, 5, 7] = 0xFF
    with pytest.raises(CheckpointError, match="layer 1, K, sequence 0, token 7, KV head 1: a code"):
        save_cache(cache, tmp_path / "c.safetensors")
    assert not list(tmp_path.iterdir())


def test_what_is_no_cache_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_cache(tmp_path / "c.safetensors")
    save_file({"layers.0.k": torch.zeros(1, 1, 1, 64)}, tmp_path / "raw")
    with pytest.raises(CheckpointError, match="quantize --from"):
        load_cache(tmp_path / "raw")


def test_room_beyond_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.safetensors"
    save_cache(make_cache(), path)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("kvquant.cache.memory.available_memory", lambda: None)  # it cannot be told
    monkeypatch.setattr(torch, "zeros", fail)
    with pytest.raises(CheckpointError, match=r"GiB, more than there is: use a smaller"):
        load_cache(path, max_seq_len=2**31 - 1)
    with pytest.raises(ConfigError, match="use a whole number from 0 to 2147483647"):
        load_cache(path, max_seq_len=2**31)
