"""Calibration of models with latent attention: what is observed, weights, plans (15 s)."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from hf_cases import LATENT_SIZES, hands_latents, random_model
from slow_cases import mark_slow

from kvquant.calibration.basis_search import error_weights
from kvquant.calibration.calibrate import Goal, calibrate
from kvquant.calibration.moments import Moments
from kvquant.calibration.report import render, sections
from kvquant.calibration.windows import Sizes
from kvquant.errors import ConfigError, UnsupportedError, UnsupportedModelError
from kvquant.hf.model import CachedModel
from kvquant.hf.models.latent import heads_of
from kvquant.io.plan import CachePlan
from kvquant.ops.mla import check_kernels
from kvquant.report.page import text as words_of
from kvquant.rows.latent import LatentFormat

pytestmark = pytest.mark.skipif(not hands_latents, reason="needs transformers 5.17")
SIZES = Sizes(observed=1024, length=256, windows=4, context=64, scored=8)
SMALL = Sizes(observed=512, length=128, windows=2, context=32, scored=4)
WIDE = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}


def deepseek(**changes: object) -> CachedModel:
    """A random model whose latents have outlier channels."""
    model = random_model("deepseek_v3", {**LATENT_SIZES, "first_k_dense_replace": 2, **changes})
    with torch.no_grad():
        for layer in model.model.model.layers:
            layer.self_attn.kv_a_layernorm.weight[::32] *= 12
            layer.self_attn.kv_b_proj.weight *= 4
    return model


class Wrapped(torch.nn.Module):
    """A linear layer of another kind, as quantization makes them."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.packed = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.packed.T


def tokens(count: int = 4000) -> list[int]:
    made = torch.Generator().manual_seed(1)
    found: list[int] = torch.randint(5, 97, (count,), generator=made).tolist()
    return found


@pytest.fixture(scope="module")
def model() -> CachedModel:
    return deepseek()


@pytest.fixture(scope="module")
def plan(model: CachedModel) -> CachePlan:
    found = calibrate(model, tokens(), sizes=SIZES)
    return found


@pytest.fixture(scope="module")
def page(plan: CachePlan) -> str:
    pytest.importorskip("matplotlib", reason="needs the report extra")
    return render(plan, "plan")


def test_latents_are_shown_with_the_queries_that_meet_them(model: CachedModel) -> None:
    """Scores and values are those of the keys and values that the model makes."""
    shown: dict[int, tuple[torch.Tensor, ...]] = {}
    text = torch.tensor([tokens(20)])

    model.observe(text, lambda layer, q, k, v, _: shown.update({layer: (q, k, v)}))
    attention = model.model.model.layers[1].self_attn
    q, latent, rope = shown[1]
    assert (q.shape, latent.shape, rope.shape) == ((1, 4, 20, 288), (1, 1, 20, 256), (1, 1, 20, 32))
    keys, _ = attention.expand_kv(latent, rope)
    heads = heads_of(attention, 256, 32)
    up = heads.weight.view(4, 88, 256)[:, :48]  # W_UK
    given = torch.linalg.lstsq(up.mT.double(), q[0, ..., :256].mT.double()).solution.mT
    scores = q @ torch.cat([latent, rope], dim=-1).mT
    whole = torch.cat([given, q[0, ..., 256:].double()], dim=-1)
    wanted = whole @ keys[0].mT.double()
    torch.testing.assert_close(scores[0].double(), wanted, atol=1e-3, rtol=1e-3)


@torch.no_grad()
def test_the_factor_of_outputs_has_the_size_of_what_errors_become() -> None:
    """Of a model that nothing has looked at before."""
    model = deepseek()
    attention, error = model.model.model.layers[0].self_attn, torch.randn(256)
    factor = model.output_weights()[0]
    assert factor.shape == (4 * 40, 256)
    _, values = attention.expand_kv(error[None, None, None], torch.zeros(1, 1, 1, 32))
    by_head = attention.o_proj.weight.view(-1, 4, 40)
    wanted = sum(by_head[:, h].mv(values[0, h, 0]).square().sum() for h in range(4))
    torch.testing.assert_close((factor @ error).square().sum(), wanted)


def test_weights_count_an_error_of_a_latent_twice(model: CachedModel) -> None:
    """As of K and as of V; that of a RoPE part once."""
    moments = Moments()
    model.observe(torch.tensor([tokens(60)]), moments.observe)
    at, weights = moments.layers[0], error_weights(model, moments)[0]
    factor = model.output_weights()[0].double()
    spread = (factor @ at.covariance("k")[0] @ factor.T).trace()
    assert at.is_latent and at.q_heads_per_kv_head == 4
    torch.testing.assert_close(weights["k"][0], at.queries[0] * spread + factor.T @ factor)
    torch.testing.assert_close(weights["v"][0], at.rope_queries[0] * spread)
    assert weights["v"].shape == (1, 32, 32)


@pytest.mark.parametrize("kind", ["kimi_linear", "bailing_hybrid"])
def test_layers_beside_those_with_latents_are_let_pass(kind: str) -> None:
    """Linear attention, which asks the cache for its states; and a gate behind attention."""
    types = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
    changes = {**LATENT_SIZES, **types, "num_experts_per_tok": 8, "topk_group": 2}
    model, shown = random_model(kind, changes), dict[int, list[int]]()
    model.observe(
        torch.tensor([tokens(20)]), lambda layer, q, *_: shown.update({layer: list(q.shape)})
    )
    assert shown == {1: [1, 4, 20, 288], 3: [1, 4, 20, 288]}
    assert {at: tuple(w.shape) for at, w in model.output_weights().items()} == {
        1: (160, 256),
        3: (160, 256),
    }


def test_layers_with_an_indexer_are_shown_with_keys_and_values() -> None:
    """Their rows are no latents that a cache could attend to."""
    model, shown = random_model("deepseek_v32", {}), dict[int, list[tuple[int, ...]]]()
    model.observe(
        torch.tensor([tokens(20)]),
        lambda layer, q, k, v, _: shown.update({layer: [tuple(x.shape) for x in (q, k, v)]}),
    )
    assert shown[0] == [(1, 2, 20, 192), (1, 2, 20, 192), (1, 2, 20, 128)]


def test_a_plan_keeps_predictions_better_at_the_same_bits(plan: CachePlan) -> None:
    assert plan.is_latent and plan.formats == [("int4-g8", "bf16")] * 2
    kl = {(row["format"], row["plan"]): row["kl"] for row in plan.facts["comparison"]}
    assert {name for name, _ in kl} == {"int4-g4", "int4-g8", "int8-g4", "fp8-g4"}
    for name in ("int4-g4", "int4-g8", "int8-g4", "fp8-g4"):
        assert 0 < kl[name, True] < 0.5 * kl[name, False], name
    assert plan.facts["measured"]["kl"] == pytest.approx(kl["int4-g8", True], rel=1e-3)
    assert plan.bits == pytest.approx(8 * (160 + 64) / 288)
    assert plan.facts["settings"]["rounding"] == "nearest" and "k.feedback" not in plan.tensors


def test_a_plan_of_latents_is_saved_told_and_used(
    plan: CachePlan, model: CachedModel, page: str, tmp_path: Path
) -> None:
    plan.save(tmp_path / "plan.safetensors")
    again = CachePlan.load(tmp_path / "plan.safetensors", model=model.config_dict)
    text = torch.tensor([tokens(40)])
    found = [
        model.prefill(model.new_cache(1, 64, plan=one, recent_len=4), text, chunk=9)
        for one in (plan, again)
    ]
    assert torch.equal(*found)
    *_, head, _, row = (line.split() for line in words_of(sections(plan)).splitlines())
    assert head == ["layers", "latents", "RoPE", "parts"]
    assert row[:2] == ["0-1", "int4-g8,"] and "bf16" in row
    assert "RoPE parts" in page


def test_parts_in_16_bit_are_stored_as_they_come(plan: CachePlan, page: str) -> None:
    """A format of fewer bits has their bases."""
    assert plan.facts["layers"][0]["v"]["basis"] != "none"  # as chosen
    assert [basis.v.is_identity for basis in plan.layers] == [True, True]
    assert not any(basis.k.is_identity for basis in plan.layers)
    assert ">bf16<" in page
    packed = plan.with_formats("int4-g8", "int8-g4")
    assert [basis.v.is_identity for basis in packed.layers] == [False, False]
    whole = plan.with_formats("bf16")
    assert all(basis.is_identity for basis in whole.layers)


@pytest.mark.slow
def test_a_float16_model_is_compared_in_rows_that_its_plan_has(model: CachedModel) -> None:
    """Its RoPE parts are fp16, which the names tell, so that with_formats finds them."""
    half = CachedModel(model.model, exact_format="fp16")
    found = calibrate(half, tokens(), sizes=SIZES)
    assert found.formats == [("int4-g8", "fp16")] * 2
    assert {row["format"] for row in found.facts["comparison"]} == {
        f"{name}+fp16" for name in ("int4-g4", "int4-g8", "int8-g4", "fp8-g4")
    }
    rows = words_of(sections(found)).splitlines()
    assert sum(row.startswith("int4-g8+fp16") for row in rows) == 1  # the plan itself has its own


@pytest.mark.gpu
def test_a_plan_on_cuda_is_as_good_as_on_the_cpu() -> None:
    found = []
    for device in ("cpu", "cuda"):
        model = deepseek(**WIDE)
        model.model.to(device)
        plan = calibrate(model, tokens(), sizes=SIZES)
        found.append({(row["format"], row["plan"]): row["kl"] for row in plan.facts["comparison"]})
    for name in ("int4-g4", "int4-g8", "int8-g4", "fp8-g4"):
        assert found[1][name, True] < 0.5 * found[1][name, False], name
        # queries and outputs of steps are rounded to bfloat16 there, of both caches
        assert found[1][name, True] < 2 * found[0][name, True] + 1e-3, name


GOALS = [Goal(max_kl=1e-3), Goal(budget=7.0), Goal(format="int4-g4+int8-g4")]


@pytest.mark.parametrize("goal", mark_slow(GOALS, [Goal(budget=7.0)]), ids=str)
def test_goals_are_reached(goal: Goal) -> None:
    found = calibrate(deepseek(**WIDE), tokens(), sizes=SMALL, goal=goal)
    if goal.max_kl is not None:
        assert found.facts["measured"]["kl"] <= goal.max_kl and found.bits < 10
    elif goal.budget is not None:
        assert 4.6 < found.bits <= goal.budget
    else:
        assert found.formats == [("int4-g4", "int8-g4")] * 2
    rows = [row for row in found.facts["comparison"] if row["format"] == "int4-g8+int8-g4"]
    assert [row["plan"] for row in rows] == [False, True]


def test_what_is_not_possible_is_refused_before_all_work(
    model: CachedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CachedModel, "observe", lambda *_: pytest.fail("it was observed"))
    llama = CachedModel.from_pretrained(Path(__file__).parents[2] / "examples" / "llama-demo-5m")
    biased, other = deepseek(), deepseek()
    for layer in biased.model.model.layers:
        layer.self_attn.kv_b_proj.bias = torch.nn.Parameter(torch.zeros(352))
    attention = other.model.model.layers[1].self_attn
    attention.o_proj = Wrapped(attention.o_proj.weight)
    refused: list[tuple[CachedModel, Goal | None, str]] = [
        (model, Goal(format="fp8"), "fp8 is FlashMLA's layout, of 512 latents"),
        (model, Goal(budget=4.0), r"a budget of 4.0 bits is below 5\.78"),
        (deepseek(**WIDE), Goal(format="fp8"), "nothing is chosen: calibrate fp8-g4"),
        (llama, Goal(format="int4-g8+int8"), r"format int4-g8\+int8 is of latent rows, and this"),
        (biased, None, "weight cannot be absorbed"),
        (other, None, r"layer 1 \(Deep\w+\) has no torch.nn.Linear"),
    ]
    for given, goal, message in refused:
        error = UnsupportedModelError if goal is None else ConfigError
        with pytest.raises(error, match=message):
            calibrate(given, tokens(), sizes=SIZES, goal=goal)
    usual = CachedModel.new_cache

    def on_cuda(self: CachedModel, *args: Any, fmt: str = "int8-g4", **options: Any) -> Any:
        check_kernels([LatentFormat.parse(fmt, 256, 32)])
        return usual(self, *args, fmt=fmt, **options)

    monkeypatch.setattr(CachedModel, "new_cache", on_cuda)
    with pytest.raises(UnsupportedError, match="int4"):
        calibrate(model, tokens(), sizes=SIZES, goal=Goal(format="int4"))
