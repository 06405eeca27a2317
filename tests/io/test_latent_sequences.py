"""Sequences of latent rows as files: round trips, refusals, what inspect says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from invariants import check_invariants
from latent_pages import from_plan, make
from latent_plans import latent_plan
from paged_cases import begin, extend, same, values
from paged_cases import make as make_plain

from kvquant import LatentPagedBatch, LatentPagedKVCache
from kvquant.errors import CheckpointError
from kvquant.io.inspect import describe, render
from kvquant.io.plan import CachePlan
from kvquant.io.sequences import load_sequences, save_sequences

GOLDEN = Path(__file__).parents[1] / "data" / "sequences-latent.safetensors"


def test_a_file_fits_caches_of_its_kind_only(tmp_path: Path) -> None:
    batch = LatentPagedBatch(make(), 4, 100)
    begin(batch, "a", 60, range(60))
    path = save_sequences(batch.cache, ["a"], tmp_path / "latent.safetensors")
    plain = make_plain()
    plain.allocate("a")
    heads = save_sequences(plain, ["a"], tmp_path / "heads.safetensors")
    caches: list[tuple[Path, Any, str]] = [
        (path, make_plain(), "latent is True in the file and False in the cache"),
        (heads, make(), "latent is False in the file and True in the cache"),
        (path, make(fmt="int8-g4"), "layer 0 is int8-g4 and int8-g8 in the file"),
    ]
    for file, cache, message in caches:
        with pytest.raises(CheckpointError, match=message):
            load_sequences(cache, file)
        assert cache.ids == []


def test_files_remember_the_bases_of_a_plan(tmp_path: Path) -> None:
    plan = latent_plan()
    batch = LatentPagedBatch(from_plan(plan), 4, 100)
    begin(batch, "a", 60, range(60))
    path = save_sequences(batch.cache, ["a"], tmp_path / "saved.safetensors")
    loaded = from_plan(plan)
    assert load_sequences(loaded, path) == ["a"]
    assert same(values(loaded, "a"), values(batch.cache, "a"))
    assert describe(path)["transformed"]
    moved = {**plan.tensors, "k.offset": plan.tensors["k.offset"] + 1}
    for cache, message in (
        (make(fmt=["int4-g8", "bf16"]), "stored in the bases of a plan: make the cache with"),
        (from_plan(CachePlan(plan.facts, moved)), r"of another plan \(layer 0 differs\)"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_sequences(cache, path)


def test_inspect_says_what_the_parts_are(tmp_path: Path) -> None:
    options: dict[str, Any] = {"latent_dim": 512, "rope_dim": 64, "fmt": ["fp8", "int4-g8+fp8-g4"]}
    cache = make(**options)
    batch = LatentPagedBatch(cache, 4, 100)
    cache.allocate("a")
    extend(batch, ["a"], 60, rows=(torch.randn(60, 1, 512), torch.randn(60, 1, 64)))
    path = save_sequences(cache, ["a"], tmp_path / "saved.safetensors")
    found = describe(path)
    assert (found["kind"], found["version"], found["latent"]) == ("pages", 1, True)
    assert [layer["format"] for layer in found["layers"]] == options["fmt"]
    assert found["layers"][0]["k"]["format"] == "fp8"
    assert found["layers"][1]["v"]["head_dim"] == 64
    shown = render(found)
    assert "latent rows fp8/int4-g8+fp8-g4: 52 tokens" in shown and "RoPE" in shown
    assert "KV head" not in shown


def golden() -> LatentPagedKVCache:
    """What stands in the golden file."""
    steps = torch.arange(40)[:, None, None] / 4
    latent = steps + torch.arange(256) / 64 - 2.0
    rope = steps - torch.arange(32) / 8
    batch = LatentPagedBatch(make(fmt=["int4-g8+fp8-g4", "int8-g4"]), 4, 100)
    batch.cache.allocate("a")
    extend(batch, ["a"], 40, range(40), rows=(latent, rope))
    batch.cache.fork("a", 7)
    extend(batch, [7], 3, range(3), rows=(latent[:3], rope[:3]))
    return batch.cache


def test_the_golden_file_still_loads() -> None:
    fresh, loaded = golden(), make(fmt=["int4-g8+fp8-g4", "int8-g4"])
    assert load_sequences(loaded, GOLDEN, model={"model_type": "deepseek_v3"}) == ["a", 7]
    check_invariants(loaded)
    for name in ("a", 7):
        assert same(values(loaded, name), values(fresh, name))
        assert loaded.state.tokens(name) == fresh.state.tokens(name)
    assert loaded.num_free_pages == fresh.num_free_pages
