"""The basis of V folded into a model's weights: the same model, for caches without it (5 s)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from relative_l2 import relative_l2

from kvquant import KVCache
from kvquant.errors import ConfigError, UnsupportedModelError
from kvquant.io.plan import CachePlan
from kvquant.rows.basis import Basis

transformers = pytest.importorskip("transformers")
from example_plan import example_plan  # noqa: E402
from hf_cases import GEMMA3N, tiny, tokens  # noqa: E402

from kvquant.hf.model import CachedModel  # noqa: E402
from kvquant.hf.models.fold import fold_values  # noqa: E402
from kvquant.io.model_id import model_identity  # noqa: E402

DIM = 64
EXACT: dict[str, Any] = {"sink_len": 0, "recent_len": 0, "exact_format": "bf16"}


def make_basis(kind: str, heads: int = 2, seed: int = 0) -> Basis:
    torch.manual_seed(seed)
    matrix = torch.eye(DIM) + 0.1 * torch.randn(heads, DIM, DIM) if kind == "matrix" else None
    return Basis(torch.randn(heads, DIM), matrix)


def make_plan(model: CachedModel, kind: str) -> CachePlan:
    """A plan of both layers in INT8, with offsets and one kind of basis for K and V."""
    made = example_plan(2, 2, DIM)
    torch.manual_seed(1)
    facts, tensors = dict(made.facts), dict(made.tensors)
    side = {"format": "int8", "basis": kind, "rounding": "nearest"}
    facts["layers"] = [{"k": side, "v": side, "kept": None} for _ in range(2)]
    facts["model"] = model_identity(model.config_dict)
    for name in "kv":
        tensors[f"{name}.offset"] = torch.randn(2, 2, DIM)
        eye = torch.eye(DIM)
        mixed = eye + 0.05 * torch.randn(2, 2, DIM, DIM)
        tensors[f"{name}.matrix"] = mixed if kind == "matrix" else eye.expand(2, 2, DIM, DIM)
    return CachePlan(facts, tensors)


def logits_of(model: CachedModel) -> torch.Tensor:
    return model.plain(tokens(2, 40))


@pytest.mark.parametrize("kind", ["none", "matrix"])
@pytest.mark.parametrize(
    "name", ["Llama", "Qwen2", "Phi3", "Gemma2", "Gemma3Text", "Qwen3", "Gemma3nText"]
)
def test_the_model_computes_what_it_did(name: str, kind: str) -> None:
    changes = {"Gemma3nText": GEMMA3N, "Phi3": {"pad_token_id": 0, "eos_token_id": 1}}
    model = tiny(name, **changes.get(name, {}))
    wanted = logits_of(model)
    before = copy.deepcopy(model.model)
    bases = {0: make_basis(kind), 1: make_basis(kind, seed=1)}
    if name == "Gemma3nText":  # its values have a norm behind the projection
        with pytest.raises(UnsupportedModelError, match=r"layer 0 of .* as they are"):
            fold_values(model.model, bases)
        for one, other in zip(before.parameters(), model.model.parameters(), strict=True):
            assert torch.equal(one, other)
        return
    fold_values(model.model, bases)
    assert relative_l2(logits_of(model), wanted) < 1e-5


@pytest.mark.parametrize("kind", ["none", "matrix"])
def test_caches_of_a_folded_model_have_no_basis_of_v(kind: str) -> None:
    model = tiny("Llama")
    plan = make_plan(model, kind)
    text = tokens(2, 30)

    def decode(plan: CachePlan | None, **options: Any) -> tuple[KVCache, torch.Tensor]:
        cache = model.new_cache(2, 64, plan=plan, **options)
        logits = [model.prefill(cache, text[:, :-3])]
        logits += [model.step(cache, text[:, i]) for i in (-3, -2, -1)]
        return cache, torch.stack(logits)

    _, exact = decode(None, k_format="bf16", v_format="bf16")
    own, wanted = decode(plan)
    folded = model.fold_values(plan)
    assert [basis.v.is_identity for basis in folded.layers] == [True, True]
    cache, logits = decode(folded)
    assert all(at.basis is not None and at.basis.v.is_identity for at in cache.layers)
    assert torch.equal(cache.seq_lens, own.seq_lens)
    error = relative_l2(wanted, exact)
    assert relative_l2(logits, exact) < max(1.5 * error, 0.02)
    assert folded.formats == plan.formats and folded.facts["measured"] == plan.facts["measured"]
    with pytest.raises(ConfigError, match="folded into this model before"):
        model.fold_values(plan)


def test_a_folded_plan_is_saved_and_loaded(tmp_path: Any) -> None:
    model = tiny("Llama")
    plan = make_plan(model, "matrix")
    plan.without_v_bases().save(tmp_path / "plan.safetensors")
    again = CachePlan.load(tmp_path / "plan.safetensors")
    assert all(basis.v.is_identity and not basis.k.is_identity for basis in again.layers)


def test_weights_that_are_not_plain_are_refused() -> None:
    class Wrapped(torch.nn.Linear):
        pass

    model = tiny("Llama")
    attention = model.model.model.layers[1].self_attn
    attention.o_proj.__class__ = Wrapped
    with pytest.raises(UnsupportedModelError, match="layer 1 of LlamaForCausalLM has a Wrapped"):
        fold_values(model.model, {1: make_basis("matrix")})
    fold_values(model.model, {0: make_basis("matrix")})


def test_layers_that_share_weights_are_refused() -> None:
    model = tiny("Llama")
    first, second = (layer.self_attn for layer in model.model.model.layers)
    second.v_proj.weight = first.v_proj.weight
    with pytest.raises(UnsupportedModelError, match=r"layers 0 and 1 of .* share weights"):
        fold_values(model.model, {i: make_basis("none") for i in range(2)})


def test_values_that_are_keys_too_are_refused() -> None:
    model = tiny("Llama")
    for layer in model.model.model.layers:
        layer.self_attn.k_proj = layer.self_attn.v_proj
    before = copy.deepcopy(model.model)
    with pytest.raises(UnsupportedModelError, match="uses its values for more than attention"):
        fold_values(model.model, {0: make_basis("matrix")})
    for one, other in zip(before.parameters(), model.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_layer_that_does_not_attend_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match=r"layers \[7\] of LlamaForCausalLM"):
        fold_values(tiny("Llama").model, {7: make_basis("none")})
