"""describe and render: what a cache file holds, and what they warn of (3 s)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvquant import KVCache, LatentKVCache
from kvquant.io.checkpoint import save_cache
from kvquant.io.inspect import describe, render

CONFIG = {"model_type": "llama", "hidden_size": 256}
ROWS: dict[str, Any] = {"k_format": "int4-g4", "v_format": "int4-g4"}


def make_keys(layers: int = 4, tokens: int = 80) -> torch.Tensor:
    """K and V of every layer: [layers, 2, batch 2, num_kv_heads 2, tokens, 64]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(layers, 2, 2, 2, tokens, 64, generator=generator)


def saved(tmp_path: Path, values: torch.Tensor, **options: Any) -> Path:
    options = ROWS | {"sink_len": 2, "recent_len": 6} | options
    lens = options.pop("lens", [values.shape[4], 10])
    cache = KVCache(len(values), 2, 2, 64, 100, **options)
    cache.start_positions.copy_(torch.tensor([0, 1000]))
    for i, (k, v) in enumerate(values):
        cache.append(i, k, v, lens)
    path = tmp_path / "c.safetensors"
    save_cache(cache, path, model=CONFIG, creation={"prompt": "a.txt"})
    return path


def test_description_counts_tokens_bytes_and_bits(tmp_path: Path) -> None:
    path = saved(
        tmp_path, make_keys(), k_format="int4-g4", v_format=["int8", "int3", "bf16", "int2"]
    )
    d = describe(path)
    assert json.loads(json.dumps(d, allow_nan=False)) == d
    assert d["version"] == 1 and d["file_bytes"] == path.stat().st_size
    assert d["model"]["type"] == "llama" and d["creation"] == {"prompt": "a.txt"}
    assert d["seq_lens"] == [80, 10] and d["positions"] == [80, 1010]
    layer = d["layers"][0]
    assert layer["k"]["tokens"] == {"sinks": 4, "packed": 72 + 2, "recent": 12}
    assert layer["k"]["bytes"] == 2 * (16 * 128 + 74 * 48)  # 2 heads; 16-bit and packed rows
    assert layer["v"]["bytes"] == 2 * (16 * 128 + 74 * 68)
    assert layer["k"]["bits_per_element"] == 6.0 and layer["v"]["bits_per_element"] == 8.5
    assert [x["v"]["format"] for x in d["layers"]] == ["int8", "int3", "bf16", "int2"]
    packed = (4 * 48 + 68 + 28 + 128 + 20) * 8 / (8 * 64)
    assert d["bits_per_element"]["packed"] == pytest.approx(packed)
    assert d["bytes"] == sum(x[side]["bytes"] for x in d["layers"] for side in "kv")
    assert d["bytes_in_16_bit"] == 4 * 2 * 2 * 90 * 64 * 2
    assert d["compression_ratio"] == d["bytes_in_16_bit"] / d["bytes"]
    assert d["bits_per_element"]["all"] == pytest.approx(16 / d["compression_ratio"])
    assert d["memory_bytes"] > d["bytes"]
    assert d["warnings"] == []


def test_scales_and_channels_are_those_of_the_rows(tmp_path: Path) -> None:
    values = make_keys()
    values[1, 0, :, 1, :, 5] += 30.0  # one channel of one head of K has an offset
    d = describe(saved(tmp_path, values, k_format="int4", v_format="fp8"))
    k, v = d["layers"][1]["k"], d["layers"][1]["v"]
    assert 0.15 < k["scale"]["min"] < 0.4 and 2.0 < k["scale"]["max"] < 2.6
    assert -4.5 < k["shift"]["min"] < k["shift"]["max"] < 0
    assert 25 < k["offset"] < 35 and 1.0 < k["step"] < 3
    assert v["offset"] < 1 and v["step"] is None
    assert len(d["warnings"]) == 1  # none of the offset: a probe says what it costs
    assert d["warnings"][0].startswith("K of layer 1: a code's step")


@pytest.mark.parametrize(
    "layer, factor, warning",
    [
        pytest.param(2, 20.0, "K of layer 2: ranges over 8 times", id="wide"),
        pytest.param(slice(None), 2000.0, "K of layers 0-3: scales over 127.9", id="unreadable"),
        pytest.param(0, 0.0, "K of layer 0: scales of 0", id="constant"),
        pytest.param(0, 1e-5, "K of layer 0: subnormal scales", id="tiny"),
    ],
)
def test_doubtful_scales_are_warned_of(
    tmp_path: Path, layer: int | slice, factor: float, warning: str
) -> None:
    values = make_keys()
    values[layer, 0] *= factor
    assert [w for w in describe(saved(tmp_path, values))["warnings"] if w.startswith(warning)]


def test_table_is_printable_and_complete(tmp_path: Path) -> None:
    values = make_keys()
    values[1, 0, :, :, :, 5] += 30.0
    path = saved(tmp_path, values, v_format="int8")
    text = render(describe(path))
    lines = text.splitlines()
    assert "kvquant cache, version 1" in lines[0]
    for words in (
        "llama, config ",
        "prompt=a.txt",
        "4 layers, 2 KV heads, 2 sequences",
        "80, 10 of 100; next position 80, 1010",
        "K int4-g4, V int8: 74 tokens; bf16: 4 first, 12 last",
        "x smaller",
    ):
        assert words in text
    assert len([line for line in lines if line.split()[1:2] == ["int4-g4"]]) == 4
    assert lines[-2].startswith("warning: K of layer 1") and lines[-1].startswith("  ")
    assert max(map(len, lines[1:])) <= 80


def test_tokens_are_those_of_layers_that_see_all(tmp_path: Path) -> None:
    windows = [30, 30, None, 5]
    d = describe(saved(tmp_path, make_keys(), windows=windows))
    assert [layer["window"] for layer in d["layers"]] == windows
    lines = render(d).splitlines()
    assert "  rows       K int4-g4, V int4-g4: 74 tokens; bf16: 4 first, 12 last" in lines
    assert "  windows    layers 0-1: the last 30 tokens; layer 3: the last 5 tokens" in lines
    lines = render(describe(saved(tmp_path, make_keys(), windows=[30] * 4))).splitlines()
    assert "  rows       K int4-g4, V int4-g4" in lines
    assert "  windows    layers 0-3: the last 30 tokens" in lines
    assert "  windows" not in render(describe(saved(tmp_path, make_keys())))


@pytest.mark.parametrize(
    "fmt, latent, rope",
    [
        ("int8-g4", "int8-g4", "bf16"),
        ("int4-g8+fp8-g4", "int4-g8", "fp8-g4"),
        ("fp8", "fp8", "bf16"),
    ],
)
def test_latent_rows_are_told_as_such(tmp_path: Path, fmt: str, latent: str, rope: str) -> None:
    cache = LatentKVCache(2, 1, 100, fmt=fmt, sink_len=2, recent_len=6)
    latents, ropes = make_keys(9, 50)[:, 0, 0, 0].movedim(1, 0).flatten(1).split([512, 64], dim=-1)
    latents[:, 5] += 30.0  # one channel has an offset
    for i in range(2):
        cache.append(i, latents[None, None], ropes[None, None])
    path = tmp_path / "c.safetensors"
    save_cache(cache, path)
    d = describe(path)
    for layer in d["layers"]:
        assert layer["format"] == fmt
        assert [layer[side]["format"] for side in "kv"] == [latent, rope]
    text = render(d)
    lines = [line.split() for line in text.splitlines()]
    assert "  shape      2 layers, 1 sequence\n" in text
    assert f"  rows       latent rows {fmt}: 42 tokens; bf16: 2 first, 6 last\n" in text
    titles = [line[1] for line in lines if line[:1] == ["layer"]]
    assert titles == ["latent", "RoPE"]
    assert [line[1] for line in lines if line[:1] == ["1"]] == [latent, rope]
    assert d["layers"][0]["k"]["offset"] > 25 and "warning: latent" not in text
    assert "fp8_ds_mla" not in text


def test_strings_of_the_file_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    cache = KVCache(1, 1, 1, 64, 8)
    path = tmp_path / "c.safetensors"
    save_cache(cache, path, creation={"\x1b[31m": "a\nb\ud800"}, model={"model_type": "\x1b]0;x"})
    text = render(describe(path))
    assert "\x1b" not in text and "?[31m=a?b?" in text
    text.encode()


def test_empty_and_exact_caches_have_no_scales(tmp_path: Path) -> None:
    d = describe(saved(tmp_path, make_keys(), lens=[0, 0]))
    assert d["compression_ratio"] is None and d["bits_per_element"] == {"packed": None, "all": None}
    assert "-" in render(d)
    assert not any("no token is packed" in warning for warning in d["warnings"])
    d = describe(saved(tmp_path, make_keys(), lens=[5, 8]))
    assert d["layers"][0]["k"]["scale"] is None and d["compression_ratio"] == 1.0
    assert d["warnings"][0].startswith(
        "no token is packed: the first 2 and the last 6 of each sequence stay in 16 bit"
    )
    assert "(--sink-len, --recent-len)" in " ".join(render(d).split())
    d = describe(saved(tmp_path, make_keys(), k_format="bf16", v_format="bf16"))
    assert d["layers"][0]["k"]["scale"] is None and d["layers"][0]["k"]["offset"] > 0
    assert d["warnings"] == []
