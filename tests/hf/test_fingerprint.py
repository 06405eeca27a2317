"""Fingerprints of weights: kvquant/hf/models/fingerprint.py."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from example_plan import example_plan

pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from kvquant import (
    CachedModel,
    CachePlan,
    CheckpointError,
    UnsupportedModelError,
    load_cache,
    save_cache,
)
from kvquant.hf.models.fingerprint import BLOCK, BLOCKS, fingerprint, fingerprint_of
from kvquant.io.model_id import model_identity

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def llama(seed: int = 0, tied: bool = False) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(**SIZES, tie_word_embeddings=tied)
    return AutoModelForCausalLM.from_config(config).to(torch.bfloat16)


def toy_plan(config: dict[str, Any]) -> CachePlan:
    return example_plan(2, 1, 64, config=config)


def test_every_tensor_counts_and_every_seed() -> None:
    model = llama()
    found = {fingerprint(model), fingerprint(llama(1))}
    for tensor in model.parameters():
        with torch.no_grad():
            tensor.view(-1)[-1] += 1
        found.add(fingerprint(model))
    assert len(found) == 2 + len(list(model.parameters()))
    with torch.no_grad():  # where samples of larger tensors end, as where they begin
        large = torch.nn.Linear(BLOCKS * BLOCK, 3, bias=False)
        before = fingerprint(large)
        large.weight[-1, -1] += 1
    assert fingerprint(large) != before


def test_layers_that_change_places_count() -> None:
    model = llama()
    before = fingerprint(model)
    weights = model.state_dict()
    model.load_state_dict(
        {
            name.replace(".0.", ".x.").replace(".1.", ".0.").replace(".x.", ".1."): x.clone()
            for name, x in weights.items()
        }
    )
    assert fingerprint(model) != before


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard", ["1GB", "50KB"])
def test_folders_agree_with_what_they_load(tmp_path: Path, tied: bool, shard: str) -> None:
    model = llama(tied=tied)
    expected = fingerprint(model)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 or shard == "50KB"
    assert fingerprint_of(tmp_path) == expected
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        assert fingerprint(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)) == expected


def test_names_of_wrappers_do_not_count() -> None:
    model = llama()
    assert fingerprint(torch.nn.ModuleDict({"wrapped": model})) == fingerprint(model)


def test_a_folder_whose_experts_are_fused_must_be_loaded(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(MixtralConfig(**SIZES, num_local_experts=2))
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"experts.* load the model"):
        fingerprint_of(tmp_path)


def test_tensors_of_any_dtype_count() -> None:
    layer = torch.nn.Linear(8, 8)
    weight, found = 100 * layer.weight.data, {fingerprint(layer)}
    changed = weight.to(torch.int8), weight.to(torch.float8_e4m3fn), torch.zeros_like(weight)
    for one in changed:
        layer.weight = torch.nn.Parameter(one, requires_grad=False)
        found.add(fingerprint(layer))
    assert len(found) == 4
    with pytest.raises(UnsupportedModelError, match="weight is not in memory"):
        fingerprint(torch.nn.Linear(8, 8, device="meta"))


def test_files_of_a_fine_tune_are_refused(tmp_path: Path) -> None:
    model, tuned = CachedModel(llama()), CachedModel(llama(1))
    assert (
        model_identity(model.config_dict)["sha256"] == model_identity(tuned.config_dict)["sha256"]
    )
    path = tmp_path / "cache.safetensors"
    save_cache(model.new_cache(1, 8), path, model=model.config_dict)
    load_cache(path, model=model.config_dict)
    load_cache(path, model=model.model.config.to_dict())  # who does not know the weights
    with pytest.raises(CheckpointError, match=r"belongs to a 'llama' model with weights .* not to"):
        load_cache(path, model=tuned.config_dict)
    save_cache(model.new_cache(1, 8), path, model=model.model.config.to_dict())
    load_cache(path, model=tuned.config_dict)  # its weights are not known


def test_plans_of_a_fine_tune_are_refused(tmp_path: Path) -> None:
    model, tuned = CachedModel(llama()), CachedModel(llama(1))
    plan = toy_plan(model.config_dict)
    assert plan.facts["model"]["weights"] == fingerprint(model.model)
    plan.save(tmp_path / "plan.safetensors")
    plan = CachePlan.load(tmp_path / "plan.safetensors", model=model.config_dict)
    for door in (tuned.fold_values, lambda plan: tuned.new_cache(1, 8, plan=plan)):
        with pytest.raises(CheckpointError, match=r"for a 'llama' model with weights .* calibrate"):
            door(plan)
    model.new_cache(1, 8, plan=plan)
    tuned.new_cache(1, 8, plan=toy_plan(tuned.model.config.to_dict()))


def test_folded_models_keep_their_fingerprint() -> None:
    model = CachedModel(llama())
    before, projection = fingerprint(model.model), model.model.model.layers[0].self_attn.v_proj
    assert projection.bias is None
    plan = model.fold_values(toy_plan(model.config_dict))
    assert projection.bias is not None
    assert fingerprint(model.model) == before
    model.new_cache(1, 8, plan=plan)


def test_weights_that_were_rounded_to_float16_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """float32 to float16 to bfloat16 rounds twice: the fingerprint may differ, and nobody can tell
    such a model from another one."""
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    half = copy.deepcopy(whole).to(torch.float16)
    plan = toy_plan(CachedModel(whole).config_dict)
    assert fingerprint(half) != fingerprint(whole)
    CachedModel(half).new_cache(1, 8, plan=plan)
    assert "in float16 only you know" in caplog.text
    with torch.no_grad():
        whole.lm_head.weight.mul_(2)
    with pytest.raises(CheckpointError, match="with weights"):
        CachedModel(whole).new_cache(1, 8, plan=plan)
