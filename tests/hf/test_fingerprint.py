"""Fingerprints of weights: kvquant/hf/models/fingerprint.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from kvquant import UnsupportedModelError
from kvquant.hf.models.fingerprint import BLOCK, BLOCKS, fingerprint, fingerprint_of

SIZES = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def llama(seed: int = 0, tied: bool = False) -> torch.nn.Module:
    torch.manual_seed(seed)
    config = LlamaConfig(**SIZES, tie_word_embeddings=tied)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    return model


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


def test_a_merged_adapter_counts() -> None:
    model = llama()
    before = fingerprint(model)
    torch.manual_seed(2)
    with torch.no_grad():
        down, up = torch.randn(4, 128), torch.randn(128, 4)
        model.get_submodule("model.layers.1.self_attn.q_proj").weight += 0.01 * up @ down
    assert fingerprint(model) != before


def test_a_folder_whose_experts_are_fused_must_be_loaded(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(MixtralConfig(**SIZES, num_local_experts=2))
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"experts.* load the model"):
        fingerprint_of(tmp_path)


@pytest.mark.parametrize(
    "change", [lambda x: x.to(torch.int8), lambda x: x.to(torch.float8_e4m3fn), torch.zeros_like]
)
def test_tensors_of_any_dtype_count(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    layer = torch.nn.Linear(8, 8)
    before = fingerprint(layer)
    layer.weight = torch.nn.Parameter(change(100 * layer.weight.data), requires_grad=False)
    assert fingerprint(layer) != before


def test_weights_elsewhere_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="weight is not in memory"):
        fingerprint(torch.nn.Linear(8, 8, device="meta"))
