"""describe and render: what files of caches and of sequences hold, and what they warn of (5 s)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import latent_pages
import pytest
import torch
from paged_cases import DIM, HEADS, LAYERS, PAGE, RECENT, SINKS, begin, extend, make

from kvquant import KVCache, LatentKVCache, LatentPagedBatch
from kvquant.io.checkpoint import save_cache
from kvquant.io.inspect import SHOWN, describe, render
from kvquant.io.sequences import save_sequences
from kvquant.paged.batch import PagedBatch
from kvquant.rows.format import RowFormat

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


def test_doubtful_scales_are_warned_of(tmp_path: Path) -> None:
    for layer, factor, warning in (
        (2, 20.0, "K of layer 2: ranges over 8 times"),
        (slice(None), 2000.0, "K of layers 0-3: scales over 127.9"),  # other programs cannot read
        (0, 0.0, "K of layer 0: scales of 0"),
        (0, 1e-5, "K of layer 0: subnormal scales"),
    ):
        values = make_keys()
        values[layer, 0] *= factor
        told = describe(saved(tmp_path, values))["warnings"]
        assert any(one.startswith(warning) for one in told), (warning, told)


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


@pytest.mark.parametrize("fmt", ["int8-g4", "int4-g8+fp8-g4", "fp8"])
def test_latent_rows_are_told_as_such(tmp_path: Path, fmt: str) -> None:
    latent, rope = fmt.split("+") if "+" in fmt else (fmt, "bf16")
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


@pytest.fixture
def batch() -> PagedBatch:
    """Three sequences: "a" of 60 tokens, a fork "b" that went on, and 7 of 2 tokens."""
    batch = PagedBatch(make(), 4, 100)
    begin(batch, "a", 60, range(60))
    batch.cache.fork("a", "b")
    extend(batch, ["b"], 9, range(9))
    begin(batch, 7, 2)
    return batch


@pytest.fixture
def path(batch: PagedBatch, tmp_path: Path) -> Path:
    path = tmp_path / "saved.safetensors"
    creation = {"prompt": "a.txt"}
    return save_sequences(batch.cache, ["b", 7, "a"], path, model=CONFIG, creation=creation)


def test_sequences_pages_and_sharing_are_those_of_the_cache(batch: PagedBatch, path: Path) -> None:
    d = describe(path)
    assert json.loads(json.dumps(d, allow_nan=False)) == d
    assert (d["kind"], d["version"], d["file_bytes"]) == ("pages", 1, path.stat().st_size)
    assert d["model"]["type"] == "llama" and d["creation"] == {"prompt": "a.txt"}
    assert (d["page_size"], d["sink_len"], d["recent_len"]) == (PAGE, SINKS, RECENT)
    assert (d["num_layers"], d["num_kv_heads"], d["exact_format"]) == (LAYERS, HEADS, "bf16")
    assert not d["transformed"]
    assert [(s["id"], s["length"], s["packed"], s["exact"]) for s in d["sequences"]] == [
        ("b", 69, 61, 8),
        (7, 2, 0, 2),
        ("a", 60, 52, 8),
    ]
    tables = {name: batch.cache.state.pool.block_table(name) for name in ("b", 7, "a")}
    shared = set(tables["a"]) & set(tables["b"])
    for s in d["sequences"]:
        assert s["pages"] == len(tables[s["id"]])
        assert s["shared"] == len(shared & set(tables[s["id"]]))
        assert s["known"] == len(batch.cache.state.tokens(s["id"]))
    assert d["shared_pages"] == len(shared) == 3
    assert d["pages"] == len(set().union(*tables.values())) == 5
    assert d["page_uses"] == 8
    assert d["warnings"] == []


def test_bytes_and_bits_are_those_of_the_rows_in_use(path: Path) -> None:
    d = describe(path)
    k, v, exact = (RowFormat.parse(name, DIM) for name in ("int4-g4", "int8", "bf16"))
    tokens = {"packed": 61 + 52 - 3 * PAGE, "exact": 8 + 2 + 8}
    for layer in d["layers"]:
        for side, fmt in (("k", k), ("v", v)):
            assert layer[side]["tokens"] == tokens
            assert layer[side]["format"] == str(fmt)
            rows = 5 * PAGE * fmt.row_bytes + tokens["exact"] * exact.row_bytes
            assert layer[side]["bytes"] == HEADS * rows
    assert d["bytes"] == sum(x[side]["bytes"] for x in d["layers"] for side in "kv")
    assert d["bytes_in_16_bit"] == LAYERS * 2 * HEADS * sum(tokens.values()) * 2 * DIM
    assert d["bits_per_element"]["packed"] == (k.bits_per_element + v.bits_per_element) / 2
    assert d["compression_ratio"] == d["bytes_in_16_bit"] / d["bytes"]


def test_scales_are_those_of_rows_in_use(batch: PagedBatch, tmp_path: Path) -> None:
    batch.cache.allocate("large")
    extend(batch, ["large"], 60, rows=(100 + torch.randn(2, 60, HEADS, DIM)).bfloat16())
    path = save_sequences(batch.cache, ["large"], tmp_path / "large.safetensors")
    d = describe(path)
    k = d["layers"][0]["k"]
    assert 0.1 < k["scale"]["min"] < k["scale"]["max"] < 0.5  # no zeros of unused rows
    assert k["scale"]["zeros"] == 0 and 90 < k["shift"]["min"] < 100
    assert k["offset"] > 50
    assert d["warnings"] == ["the file does not say which model it belongs to"]


def test_tables_are_printable_and_complete(path: Path) -> None:
    text = render(describe(path))
    lines = text.splitlines()
    assert "kvquant sequences of a paged cache, version 1" in lines[0]
    for words in (
        "llama, config ",
        "prompt=a.txt",
        "2 layers, 2 KV heads, 3 sequences",
        "5 of 16 tokens; 3 are shared: 8 without sharing",
        "K int4-g4, V int8: 65 tokens; bf16: 18, the first 3 and the last 5 of each sequence",
        "x smaller",
    ):
        assert words in text
    cells = [line.split() for line in lines]
    assert ["b", "69", "61", "8", "4", "3", "69"] in cells
    assert ["7", "2", "0", "2", "0", "0", "0"] in cells
    assert len([line for line in cells if line[1:2] == ["int4-g4"]]) == LAYERS
    assert max(map(len, lines[1:])) < 120


def test_namespaces_are_shown_where_there_are_any(path: Path, tmp_path: Path) -> None:
    _, shown = render(describe(path)).split("\n", 1)  # the first line has the path
    assert "namespace" not in shown
    cache = make()
    cache.allocate("a", namespace="\x1b[31madapter")
    cache.allocate("b")
    d = describe(save_sequences(cache, ["a", "b"], tmp_path / "named.safetensors"))
    assert [one["namespace"] for one in d["sequences"]] == ["\x1b[31madapter", None]
    cells = [line.split() for line in render(d).splitlines()]
    assert ["a", *"000000", "?[31madapter"] in cells and ["b", *"000000", "-"] in cells


def test_the_parts_of_latent_rows_are_told(tmp_path: Path) -> None:
    formats = ["fp8", "int4-g8+fp8-g4"]
    cache = latent_pages.make(latent_dim=512, rope_dim=64, fmt=formats)
    cache.allocate("a")
    rows = torch.randn(60, 1, 512), torch.randn(60, 1, 64)
    extend(LatentPagedBatch(cache, 4, 100), ["a"], 60, rows=rows)
    found = describe(save_sequences(cache, ["a"], tmp_path / "saved.safetensors"))
    assert (found["kind"], found["version"], found["latent"]) == ("pages", 1, True)
    assert [layer["format"] for layer in found["layers"]] == formats
    assert found["layers"][0]["k"]["format"] == "fp8"
    assert found["layers"][1]["v"]["head_dim"] == 64
    shown = render(found)
    assert "latent rows fp8/int4-g8+fp8-g4: 52 tokens" in shown and "RoPE" in shown
    assert "KV head" not in shown


def test_few_of_many_sequences_are_printed_and_none_can_write_to_the_terminal(
    tmp_path: Path,
) -> None:
    cache = make(max_num_seqs=SHOWN + 5)
    for i in range(SHOWN + 5):
        cache.allocate(f"\x1b[31m{i}\n")
    path = save_sequences(cache, cache.ids, tmp_path / "empty.safetensors")
    d = describe(path)
    assert len(d["sequences"]) == SHOWN + 5 and d["bytes"] == d["pages"] == 0
    text = render(d)
    assert "\x1b" not in text and f"?[31m{SHOWN - 1}?" in text
    assert f"?[31m{SHOWN}?" not in text and "... and 5 more" in text
