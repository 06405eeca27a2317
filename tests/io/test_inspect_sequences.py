"""describe and render of files of a paged cache: sequences, pages, sharing, rows (3 s)."""

from __future__ import annotations

import json
from pathlib import Path

import latent_pages
import pytest
import torch
from paged_cases import DIM, HEADS, LAYERS, PAGE, RECENT, SINKS, begin, extend, make

from kvquant import LatentPagedBatch
from kvquant.io.inspect import SHOWN, describe, render
from kvquant.io.sequences import save_sequences
from kvquant.paged.batch import PagedBatch
from kvquant.rows.format import RowFormat

CONFIG = {"model_type": "llama", "hidden_size": 256}


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
