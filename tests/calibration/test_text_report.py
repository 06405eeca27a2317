"""Tables and warnings (1 s)."""

from typing import Any

import pytest
from example_plan import example_plan

from kvquant.calibration.text_report import refusal, render_plan, warnings
from kvquant.io.plan import CachePlan

ROW = {"bits": 4.25, "kl": 0.0002, "top1": 0.99, "perplexity": 15.0}


def plan(**facts: Any) -> CachePlan:
    example = example_plan()
    layers = [entry | {"kept": None} for entry in example.facts["layers"]]
    comparison = [{"format": "int4", "plan": planned} | ROW for planned in (False, True)]
    limit = {"max_kl": 0.01, "budget": None, "met": True}
    given = {"layers": layers, "comparison": comparison, "limit": limit, "blamed": []} | facts
    return CachePlan({**example.facts, **given}, example.tensors)


def test_the_table_names_each_format_with_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    good = {"format": "int8", "plan": False} | ROW | {"bits": 8.25, "kl_error": 3e-5}
    bad = {"format": "int4", "plan": False} | ROW | {"kl": 2.318, "top1": 0.3625}
    monkeypatch.setenv("COLUMNS", "120")
    comparison = [good | {"top1_error": 0.004}, bad | {"perplexity": 161.0}]
    lines = [line.split() for line in render_plan(plan(comparison=comparison)).splitlines()]
    figures = {" ".join(words[:2]): words[2:] for words in lines if words[1:2] == ["plain"]}
    assert figures == {
        "int8, plain": ["8.25", "1.94x", "0.00020", "0.00003", "99.00", "0.40", "15.000"],
        "int4, plain": ["4.25", "3.76x", "2.31800", "-", "36.25", "-", "161.000"],
    }


def test_a_plan_is_printed_beside_plain_formats_with_its_layers() -> None:
    lines = render_plan(plan()).splitlines()
    assert [line.split("  ")[0] for line in lines[3:7]] == [
        "16 bit",
        "this plan",
        "int4, plain",
        "int4 + bases",
    ]
    assert "+ bases: one format for all layers, rows transformed as in this plan" in lines
    assert lines[3].split()[2:] == ["16.00", "1.00x", "-", "-", "-", "-", "15.025"]
    assert max(map(len, lines)) <= 80
    assert lines[-5:] == [
        "layer 0: K int4, V int8",
        "layer 1: K int4, V int4",
        "layer 2: K bf16, V bf16",
        "",
        "KL 0.0066 with the plan, 0.0002 in plain int4 rows (no certain gain)",
    ]


def test_steepness_stands_behind_the_layers() -> None:
    steep = [{"k": 3.914, "v": 1.9}, {"k": 1.0, "v": 12.3}, {"k": 2.0, "v": 2.0}]
    lines = render_plan(plan(steepness=steep)).splitlines()
    at = lines.index("layer 2: K bf16, V bf16") + 2
    assert [line.split() for line in lines[at + 1 :]] == [
        [],
        ["steepness", "steepness"],
        ["layer", "of", "K", "of", "V"],
        [lines[at + 4]],
        ["0", "3.91", "1.90"],
        ["1", "1.00", "12.30"],
        ["2", "2.00", "2.00"],
    ]
    assert max(map(len, lines)) <= 80


def test_a_plan_of_one_format_is_printed_once() -> None:
    side = {"format": "int4", "basis": "none", "rounding": "nearest"}
    text = render_plan(plan(layers=[{"k": side, "v": side, "kept": None}] * 3))
    assert "int4, plain" in text and "this plan" in text and "+ bases" not in text


def test_a_plan_is_represented_in_a_line() -> None:
    assert repr(plan()) == (
        "CachePlan(qwen2, 3 layers, K bf16/int4, V bf16/int4/int8, 9.00 bits per element, "
        "KL 0.0066 nats per token)"
    )


def test_a_model_that_bears_all_is_not_warned_of() -> None:
    assert warnings(plan()) == []


@pytest.mark.parametrize("kl", [2.318, float("nan")])
def test_formats_that_destroy_the_predictions_are_named(kl: float) -> None:
    bad = {"format": "int4", "plan": False} | ROW | {"kl": kl}
    (warning,) = warnings(plan(comparison=[bad]))
    assert warning.startswith(f"int4 rows without a plan: KL {kl:.2f} nats")
    assert "do not decode" in warning


def test_a_noticeable_loss_is_told_in_milder_words() -> None:
    (warning,) = warnings(plan(measured=ROW | {"kl": 0.0712, "top1": 0.874}))
    assert warning.startswith("this plan: KL 0.071 nats per token, 87 % of the likeliest")
    assert "noticeable" in warning and "do not" not in warning


def test_what_was_not_measured_or_is_kept_is_told() -> None:
    layers = [*plan().facts["layers"][:2], plan().facts["layers"][2] | {"kept": "it is odd"}]
    said = warnings(plan(measured=None, layers=layers))
    assert "was not measured: give --text" in said[0]
    assert said[1] == "layer 2 is kept in 16 bit: it is odd"


@pytest.mark.parametrize(
    ("kl", "error", "words"),
    [
        (0.5, 0.01, "KL 0.0066 with the plan, 0.5 in plain int4 rows (use it)"),
        (0.007, 0.001, "KL 0.0066 with the plan, 0.007 in plain int4 rows (no certain gain)"),
        (0.001, None, "KL 0.0066 with the plan, 0.001 in plain int4 rows (no certain gain)"),
        (None, None, ""),
    ],
)
def test_what_a_plan_brings_is_what_was_measured(
    kl: float | None, error: float | None, words: str
) -> None:
    row = {"format": "int4", "plan": False} | ROW | {"kl": kl, "kl_error": error}
    facts: dict[str, Any] = {"comparison": [], "measured": None}
    if kl is not None:
        facts = {"comparison": [row]}
    said = [line for line in render_plan(plan(**facts)).splitlines() if "with the plan" in line]
    assert said == ([words] if words else [])


@pytest.mark.parametrize(
    ("layers", "words"),
    [([2], "layer 2 costs the most"), ([2, 0, 1], "layers 2, 0 and 1 cost the most")],
    ids=["one", "three"],
)
def test_a_limit_that_is_not_met_names_the_layers_to_blame(layers: list[int], words: str) -> None:
    limit = {"max_kl": 1e-4, "budget": 5.0, "met": False}
    said = refusal(plan(limit=limit, blamed=layers))
    assert said is not None
    assert "0.0001 nats per token is not met within 5 bits" in said and words in said
    assert refusal(plan()) is None
