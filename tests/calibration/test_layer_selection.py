"""Which layers a cache holds: shapes, and models that mix kinds of layers (20 s)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from slow_cases import mark_slow

from kvquant.calibration.calibrate import calibrate
from kvquant.calibration.layer_selection import HeldLayers, left_out, renumbered
from kvquant.calibration.moments import LayerMoments, Moments
from kvquant.calibration.report import notes, sections
from kvquant.calibration.windows import Sizes, random_tokens
from kvquant.cli.main import main
from kvquant.errors import UnsupportedModelError
from kvquant.io.plan import CachePlan
from kvquant.report.page import text

pytest.importorskip("transformers")
from families import CHANGES
from hf_cases import random_module
from tiny_models import tiny_model

from kvquant.hf.cache import QuantizedCache
from kvquant.hf.model import CachedModel
from kvquant.hf.models.configs import CacheLayers

DEMO = Path(__file__).parents[2] / "examples" / "llama-demo-5m"
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 64}
EXPERTS_OF_GPT_OSS = {"num_local_experts": 2, "num_experts_per_tok": 1}
LINEAR: dict[str, Any] = {
    **EXPERTS,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_expert_intermediate_size": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
CONV: dict[str, Any] = {"num_hidden_layers": 3}
CONV["layer_types"] = ["conv", "full_attention", "full_attention"]


def moments(shapes: dict[int, tuple[int, int, int]]) -> Moments:
    made = Moments()
    for layer, (heads, k_dim, v_dim) in shapes.items():
        made.layers[layer] = LayerMoments(2 * heads, heads, k_dim, v_dim)
    return made


def cached(*places: int, count: int, **given: Any) -> CacheLayers:
    """Caches of layers with 2 KV heads of 64 elements."""
    dims, windows = (64,) * len(places), (None,) * len(places)
    return CacheLayers(places, 2, dims, dims, windows, count=count, **given)


def test_layers_of_one_shape_are_all_held() -> None:
    assert left_out(moments({0: (2, 64, 64), 1: (2, 64, 64)}), cached(0, 1, count=2)) == {}


def test_layers_that_caches_do_not_have_are_named() -> None:
    shapes = {1: (2, 64, 64), 2: (4, 64, 64), 5: (2, 64, 64), 6: (2, 64, 64)}
    others = {0: "is 'conv'", 2: "has 4 KV heads"}
    layers = cached(1, 5, count=7, others=others, shared={6: 5})
    assert left_out(moments(shapes), layers) == {
        0: "it is 'conv'",
        2: "it has 4 KV heads",
        3: "it has no keys and values",
        4: "it has no keys and values",
        6: "it attends to the keys and values of layer 5",
    }
    held = renumbered(moments(shapes), layers)
    assert set(held.layers) == {0, 1}


@pytest.mark.parametrize("shape", [None, (4, 64, 64), (2, 72, 64), (2, 64, 128)])
def test_layers_that_attend_otherwise_than_caches_have_them_are_refused(shape: Any) -> None:
    shapes = {0: (2, 64, 64)} | ({} if shape is None else {1: shape})
    with pytest.raises(UnsupportedModelError, match=r"rows for layers \[1\], and no such layers"):
        left_out(moments(shapes), cached(0, 1, count=2))


WIDE = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "place"), [("mimo_v2_flash", 0), ("gemma4_text", 5)])
def test_plans_of_models_with_other_heads_in_windows_serve_their_caches(
    kind: str, place: int
) -> None:
    few = {**CHANGES[kind], "num_hidden_layers": 6, **(WIDE if place else {})}
    few["layer_types"] = ["sliding_attention"] * 6
    few["layer_types"][place] = "full_attention"
    module = random_module(kind, few)
    plan = calibrated(CachedModel(module))
    assert plan.places == [place]
    module.set_attn_implementation("kvquant")
    QuantizedCache(module, plan=plan)


def test_layers_that_share_are_read_as_those_that_they_share_with() -> None:
    """The layers of the cache are counted from 0."""
    shapes, layers = dict.fromkeys(range(4), (2, 64, 64)), cached(1, 2, count=4, shared={3: 1})
    why = "it attends to the keys and values of layer 1"
    assert left_out(moments(shapes), layers) == {0: "it has no keys and values", 3: why}

    class Model:
        def observe(self, tokens: torch.Tensor, observer: Any, begin: float = 0.0) -> None:
            for layer in shapes:
                observer(layer, *[torch.tensor(layer)] * 3, 1.0)

        def output_weights(self) -> dict[int, torch.Tensor]:
            return {layer: torch.full((1, 4), float(layer)) for layer in shapes}

    model: Any = Model()
    held, seen = HeldLayers(model, layers), []
    held.observe(torch.zeros(1), lambda layer, q, k, v, scale: seen.append((layer, int(q))))
    assert seen == [(0, 1), (1, 2)]
    weights = {at: [float(row[0]) for row in w] for at, w in held.output_weights().items()}
    assert weights == {0: [1.0, 3.0], 1: [2.0]}
    q, k, v = torch.randn(3, 1, 4, 5, 64)
    found, alike = Moments(), Moments()
    for layer, own in ((1, q), (2, q), (3, 2 * q)):
        found.observe(layer, own, k[:, :2], v[:, :2], 1.0)
    merged = renumbered(found, layers)
    alike.observe(0, q, k[:, :2], v[:, :2], 1.0)
    expected = alike.layers[0].queries * (1 + 4) / 2
    torch.testing.assert_close(merged.layers[0].queries, expected)
    torch.testing.assert_close(merged.layers[1].queries, alike.layers[0].queries)
    assert torch.equal(merged.layers[0].mean("k"), alike.layers[0].mean("k"))
    assert merged.count == found.count == 5


SIZES = Sizes(observed=128, length=32, windows=1, context=48, scored=8)


def calibrated(model: CachedModel) -> CachePlan:
    """A plan; rows of 8 bits lose far less than those of 4."""
    plan = calibrate(model, random_tokens(model.config_dict, 400), sizes=SIZES)
    kl = {(row["format"], row["plan"]): row["kl"] for row in plan.facts["comparison"]}
    assert 0 < kl["int8", False] < 0.2 * kl["int4", False]
    return plan


@pytest.mark.parametrize("head_dim", mark_slow([64, 128], [128]))
def test_models_that_share_keys_are_calibrated(head_dim: int) -> None:
    changes: dict[str, Any] = {"num_hidden_layers": 4, "num_kv_shared_layers": 2}
    changes |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 32}
    changes |= {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 256}
    model = tiny_model("Gemma4Text", **changes, global_head_dim=head_dim)
    if head_dim == 128:
        told = "have unlike head_dim .K/V 64/64, 128/128., and a plan has one"
        with pytest.raises(UnsupportedModelError, match=told):
            calibrated(model)
        return
    plan = calibrated(model)
    why = {one["layer"]: one["why"] for one in plan.facts["others"]}
    assert why[2] == "it attends to the keys and values of layer 0"
    assert plan.places == [0, 1] and plan.facts["measured"]["in_one_pass"] is None
    cache = model.new_cache(1, 64, plan=plan)
    model.prefill(cache, torch.zeros(1, 40, dtype=torch.int64), chunk=9)
    assert [at.seq_lens.tolist() for at in cache.layers] == [[40]] * 2


def test_hybrid_models_are_calibrated_but_for_layers_without_keys() -> None:
    plan = calibrated(tiny_model("Qwen3Next", **LINEAR))
    assert plan.places == [1] and plan.formats == [("int4", "int4")]
    why = "it is 'linear_attention', which keeps other than keys and values"
    assert plan.facts["others"] == [{"layer": layer, "why": why} for layer in (0, 2)]
    assert "a KVCache alone does not serve such a" in plan.facts["measured"]["in_one_pass"]
    assert "cannot decode from a KVCache" in notes(plan)[0]
    said = text(sections(plan))
    assert "linear_attention" in said
    assert any(line.startswith("1  ") and "int4" in line for line in said.splitlines())


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Gemma3Text", {"layer_types": ["sliding_attention", "full_attention"]}),
        ("Gemma2", {"query_pre_attn_scalar": 64}),  # a soft cap
        pytest.param("GptOss", EXPERTS_OF_GPT_OSS, marks=pytest.mark.slow),  # sink logits
    ],
)
def test_models_whose_attention_has_windows_caps_or_sinks_are_calibrated(
    kind: str, changes: dict[str, Any]
) -> None:
    plan = calibrated(tiny_model(kind, sliding_window=32, **changes))
    assert plan.facts["others"] == []
    assert plan.facts["measured"]["in_one_pass"] is None  # by decoding


def test_the_command_lists_the_layers_that_are_not_in_the_cache(tmp_path: Path) -> None:
    folder, path = tmp_path / "model", tmp_path / "plan.safetensors"
    vocabulary = tiny_model("Lfm2", **CONV, vocab_size=8192)
    vocabulary.model.save_pretrained(folder)
    for name in DEMO.glob("token*"):
        shutil.copy(name, folder)
    text = str(DEMO.parent / "unseen.txt")
    sizes = "--observed 256 --length 64 --windows 2 --context 64 --scored 4".split()
    given = ["calibrate", str(folder), "--text", text, *sizes, "-o", str(path)]
    result = CliRunner().invoke(main, given)
    assert result.exit_code == 0, result.output
    (row,) = (line for line in result.stdout.splitlines() if line.startswith("0  "))
    assert "-" in row.split() and "'conv'" in result.stdout
    assert "not in the cache: it is 'conv'," in " ".join(result.stdout.split())
    assert "Warning: This model cannot decode from a KVCache (layer 0 is 'conv'" in result.stderr
    assert CachePlan.load(path).facts["places"] == [1, 2]
