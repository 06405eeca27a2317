"""The basis of V folded into a model's weights: the same model, for caches without it (5 s)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from relative_l2 import relative_l2
from small_caches import make_basis

from kvquant import KVCache
from kvquant.errors import ConfigError, UnsupportedModelError
from kvquant.io.plan import CachePlan

transformers = pytest.importorskip("transformers")
from hf_cases import GEMMA3N, int8_plan, tiny, tokens  # noqa: E402

from kvquant.hf.model import CachedModel  # noqa: E402
from kvquant.hf.models.fold import fold_values  # noqa: E402


def logits_of(model: CachedModel) -> torch.Tensor:
    return model.plain(tokens(2, 40))


@pytest.mark.parametrize("kind", ["none", "matrix"])
@pytest.mark.parametrize("name", "Llama Qwen2 Phi3 Gemma2 Gemma3Text Qwen3 Gemma3nText".split())
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
    plan = int8_plan(model, kind)
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
    plan = int8_plan(model, "matrix")
    plan.without_v_bases().save(tmp_path / "plan.safetensors")
    again = CachePlan.load(tmp_path / "plan.safetensors")
    assert all(basis.v.is_identity and not basis.k.is_identity for basis in again.layers)


class Wrapped(torch.nn.Linear):
    pass


def wrap(first: Any, second: Any) -> None:
    second.o_proj.__class__ = Wrapped


def share_weights(first: Any, second: Any) -> None:
    second.v_proj.weight = first.v_proj.weight


def share_keys(*layers: Any) -> None:
    for layer in layers:
        layer.k_proj = layer.v_proj


REFUSED: list[tuple[Any, tuple[int, ...], str]] = [
    (wrap, (1,), "layer 1 of LlamaForCausalLM has a Wrapped"),
    (share_weights, (0, 1), r"layers 0 and 1 of .* share weights"),
    (share_keys, (0,), "uses its values for more than attention"),
    (lambda *_: None, (7,), r"layers \[7\] of LlamaForCausalLM"),
]


@pytest.mark.parametrize(("change", "layers", "told"), REFUSED, ids=[told for *_, told in REFUSED])
def test_what_cannot_be_folded_is_refused(change: Any, layers: tuple[int, ...], told: str) -> None:
    model = tiny("Llama")
    change(*(layer.self_attn for layer in model.model.model.layers))
    before = copy.deepcopy(model.model)
    with pytest.raises(UnsupportedModelError, match=told):
        fold_values(model.model, {layer: make_basis("matrix") for layer in layers})
    for one, other in zip(before.parameters(), model.model.parameters(), strict=True):
        assert torch.equal(one, other)
    if change is wrap:  # the other layer is
        fold_values(model.model, {0: make_basis("matrix")})
