"""Plans, and caches that are made and saved with one (5 s)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from example_plan import example_plan
from safetensors import safe_open
from safetensors.torch import save_file

from kvquant import KVCache, load_cache, save_cache
from kvquant.errors import CheckpointError, ConfigError
from kvquant.identity import model_identity
from kvquant.paged import PagedKVCache
from kvquant.plan import CachePlan

CONFIG = {"model_type": "llama", "hidden_size": 64}


@pytest.fixture
def plan() -> CachePlan:
    plan = example_plan()
    facts = {**plan.facts, "model": model_identity(CONFIG)}
    return CachePlan(facts, plan.tensors)


@pytest.fixture
def path(plan: CachePlan, tmp_path: Path) -> Path:
    plan.save(tmp_path / "plan.safetensors")
    return tmp_path / "plan.safetensors"


def filled(plan: CachePlan, **options: Any) -> KVCache:
    cache = KVCache.from_plan(plan, 2, 30, **({"sink_len": 2, "recent_len": 4} | options))
    torch.manual_seed(4)
    for layer in range(3):
        k, v = torch.randn(2, 2, 2, 21, 64)
        cache.append(layer, k, v, [21, 9])
    return cache


@pytest.mark.parametrize("option", ["k_format", "v_format", "bases"])
def test_options_that_a_plan_decides_are_refused(plan: CachePlan, option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} with a plan: .* use plan.with_formats"):
        KVCache.from_plan(plan, 2, 30, **{option: "int8"})
    with pytest.raises(ConfigError, match=f"{option} with a plan: .* use plan.with_formats"):
        PagedKVCache.from_plan(plan, 4, **{option: "int8"})


def test_places_are_those_of_the_cache_unless_told(plan: CachePlan) -> None:
    facts = {name: value for name, value in plan.facts.items() if name != "places"}
    assert CachePlan(facts, plan.tensors).places == [0, 1, 2]
    assert CachePlan({**facts, "places": [1, 3, 5]}, plan.tensors).places == [1, 3, 5]


def test_a_plan_is_read_as_it_was_written(plan: CachePlan, path: Path) -> None:
    again = CachePlan.load(path, model=CONFIG)
    assert again.facts == json.loads(json.dumps(plan.facts))
    assert again.tensors.keys() == plan.tensors.keys()
    for name, tensor in plan.tensors.items():
        assert torch.equal(again.tensors[name], tensor.float()), name
    assert again.formats == [("int4", "int8"), ("int4", "int4"), ("bf16", "bf16")]
    assert [again.num_layers, again.num_kv_heads, again.head_dim] == [3, 2, 64]


def test_bits_are_those_of_the_rows(plan: CachePlan) -> None:
    assert plan.bits == pytest.approx((3 * 4.5 + 8.5 + 2 * 16) / 6)
    uniform = plan.with_formats("int8")
    assert uniform.formats[:2] == [("int8", "int8")] * 2
    assert uniform.formats[2] == ("bf16", "bf16")  # it is kept
    assert uniform.facts["measured"] is None
    assert uniform.facts["bits"] == uniform.bits != plan.bits
    clip = uniform.layers[0].k.clip
    assert clip is not None and torch.equal(clip, plan.tensors["k.clip.int8"][0])
    assert plan.with_formats("int8", "int4").formats[0] == ("int8", "int4")
    with pytest.raises(ConfigError, match="'int5' does not exist"):
        plan.with_formats("int5")


def test_a_plan_for_another_model_is_refused(path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"was made for a 'llama' model.*calibrate this"):
        CachePlan.load(path, model=CONFIG | {"hidden_size": 65})


def edited(path: Path, edit: Callable[[dict[str, Any], dict[str, torch.Tensor]], object]) -> None:
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["kvquant"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    edit(facts, tensors)
    save_file(tensors, path, {"kvquant": json.dumps(facts)})


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda facts, _: facts.update(format="x"), "no plan of `kvquant calibrate`"),
        (lambda facts, _: facts.update(version=2), "version 2, this kvquant reads 1"),
        (lambda facts, _: facts.pop("layers"), "the plan is damaged"),
        (lambda facts, _: facts["layers"][0]["k"].update(basis="dct"), "unknown basis"),
        (lambda facts, _: facts["layers"][0]["k"].update(format="int5"), "'int5' does not exist"),
        (lambda facts, _: facts["layers"][0]["k"].update(rounding="feedback"), "k.'feedback' is"),
        (lambda _, tensors: tensors.pop("k.offset"), "'k.offset' is missing"),
        (lambda _, tensors: tensors["k.offset"].add_(1), "'k.offset' is damaged"),
        (lambda facts, _: facts["layers"].pop(), "does not fit"),
    ],
    ids="format version layers basis codec feedback missing damaged count".split(),
)
def test_damaged_plans_are_refused(
    path: Path, edit: Callable[[dict[str, Any], dict[str, torch.Tensor]], object], words: str
) -> None:
    edited(path, edit)
    with pytest.raises(CheckpointError, match=words) as raised:
        CachePlan.load(path)
    assert str(path) in str(raised.value)


def test_other_files_are_no_plans(tmp_path: Path, plan: CachePlan, path: Path) -> None:
    save_cache(filled(plan), tmp_path / "cache.safetensors")
    with pytest.raises(CheckpointError, match="no plan of"):
        CachePlan.load(tmp_path / "cache.safetensors")
    with pytest.raises(FileNotFoundError):
        CachePlan.load(tmp_path / "none.safetensors")
    with pytest.raises(CheckpointError, match="calibration file, not a cache: it holds the plan"):
        load_cache(path)


def test_a_saved_cache_goes_on_with_its_plan(plan: CachePlan, tmp_path: Path) -> None:
    cache, path = filled(plan), tmp_path / "cache.safetensors"
    save_cache(cache, path)
    again = load_cache(path, plan=plan.with_formats("int8"))  # formats are the file's
    k, v = torch.randn(2, 2, 2, 5, 64)
    q = torch.randn(2, 4, 64)
    for layer in range(3):
        for one in (cache, again):
            one.append(layer, k, v)
        for name, tensor in cache.layers[layer].tensors().items():
            assert torch.equal(tensor, again.layers[layer].tensors()[name]), name
        out, given = cache.attend(layer, q), again.attend(layer, q)
        assert isinstance(out, torch.Tensor) and isinstance(given, torch.Tensor)
        assert torch.equal(out, given)


def test_rows_of_one_basis_are_not_read_in_another(plan: CachePlan, tmp_path: Path) -> None:
    path, plain = tmp_path / "cache.safetensors", tmp_path / "plain.safetensors"
    save_cache(filled(plan), path)
    with pytest.raises(CheckpointError, match="was made with a plan, whose bases"):
        load_cache(path)
    tensors = dict(plan.tensors)
    tensors["v.offset"] = tensors["v.offset"].clone()
    tensors["v.offset"][1, 0, 0] += 1
    with pytest.raises(CheckpointError, match=r"with another plan \(layer 1 differs\)"):
        load_cache(path, plan=CachePlan(plan.facts, tensors))
    save_cache(KVCache(3, 1, 2, 64, 8), plain)
    with pytest.raises(CheckpointError, match="without a plan"):
        load_cache(plain, plan=plan)
