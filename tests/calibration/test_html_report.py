"""The report of a plan: its words, its figures, the command (10 s)."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from example_plan import example_plan
from html_page import HtmlPage, assert_stands_alone

from kvquant.calibration import figures
from kvquant.calibration import html_report as htmlreport
from kvquant.calibration.text_report import paired_error, render_plan
from kvquant.calibration.verdict import kl_text, next_steps, number, percent, verdict
from kvquant.cli.report import report
from kvquant.errors import ConfigError
from kvquant.io.plan import CachePlan

FIGURES = 5


def changed(plan: CachePlan, **facts: Any) -> CachePlan:
    return replace(plan, facts={**plan.facts, **facts})


@pytest.fixture(scope="module")
def page() -> str:
    pytest.importorskip("matplotlib", reason="needs the report extra")
    return htmlreport.render(example_plan(), "plan <1>.safetensors")


def test_the_page_stands_alone_and_is_whole(page: str) -> None:
    names = [tag for tag, _ in HtmlPage(page).tags]
    assert names.count("svg") == names.count("figure") == 2 * FIGURES  # for a phone too
    assert_stands_alone(page)
    for drawn in figures.comparison(example_plan()):
        assert drawn in page, "drawn once more it is the same"


def test_figures_take_the_colours_of_the_page(page: str) -> None:
    assert "var(--ink)" in page and "prefers-color-scheme: dark" in page
    assert "#010203" not in page and "#040506" not in page
    assert "#3b82c4" in page  # data keep theirs


def test_the_verdict_comes_first_and_numbers_follow(page: str) -> None:
    text = " ".join(HtmlPage(page).text.split())
    assert text.index("Fit for use.") < text.index("bits per element") < text.index("Formats")
    assert "KL 0.0066 nats per token, within the limit of 0.01" in text
    assert (
        "Without a plan, int8 in all layers (8.25 bits): 36.2 ± 0.5 % of cases, KL 0.043." in text
    )
    assert "layer 2 is kept in 16 bit: its rows are 72 wide" in text
    assert "8,192 tokens after 2,048 tokens of context" in text


def test_what_a_file_says_is_text_not_markup(page: str) -> None:
    assert "plan &lt;1&gt;.safetensors" in page
    assert "valid &lt;2&gt;.txt" in page


@pytest.mark.extra("report")
def test_a_plan_without_text_has_fewer_figures() -> None:
    plan = example_plan()
    kept = ("k.mean", "v.mean", "k.offset", "v.offset")
    tensors = {name: plan.tensors[name] for name in kept}
    plan = CachePlan({**plan.facts, "zero_data": True, "measured": None}, tensors)
    found = HtmlPage(htmlreport.render(plan, "plan.safetensors"))
    assert [tag for tag, _ in found.tags].count("svg") == 4  # formats and layers
    assert "Not measured." in found.text and "random tokens, no text." in found.text


@pytest.mark.parametrize(
    ("plan", "kind", "mark"),
    [
        (example_plan(), "good", "Fit for use."),
        (example_plan(kl=0.03, met=False), "bad", "Limit not met."),
        (example_plan(kl=0.06, max_kl=None), "notice", "Noticeable loss."),
        (example_plan(kl=2.3, max_kl=None), "bad", "Do not decode from this cache."),
        (example_plan(kl=float("nan"), max_kl=None), "bad", "Do not decode from this cache."),
    ],
    ids=["good", "limit", "notice", "bad", "nan"],
)
def test_the_verdict_follows_the_measure(plan: CachePlan, kind: str, mark: str) -> None:
    found = verdict(plan)
    assert found[:2] == (kind, mark)
    blamed = "Most of it comes from layer 1 (alone KL 0.0022), layer 0" in " ".join(found[3])
    assert blamed == (kind == "bad")


def test_a_plan_that_keeps_all_in_16_bit_is_told() -> None:
    plan = example_plan()
    plan = changed(plan, layers=[plan.facts["layers"][-1]] * 3)
    kind, _, sentence, further = verdict(plan)
    assert kind == "good" and "1.0 times smaller" in sentence and len(further) == 1


def test_figures_are_not_cut_on_a_phone(page: str) -> None:
    kinds = [attributes["class"] for tag, attributes in HtmlPage(page).tags if tag == "figure"]
    assert kinds == FIGURES * ["wide", "narrow"]
    assert "min-width: 40rem" not in page
    assert "(max-width: 40rem) { .wide { display: none } .narrow { display: block } }" in page


@pytest.mark.extra("report")
def test_no_string_of_a_file_is_markup_or_a_formula() -> None:
    script, quote, dollars, template = (
        "<script>alert(1)</script>",
        "\"onload='x",
        "$x^2$",
        "{{7*7}}",
    )
    plan = example_plan()
    rows = [row | {"format": dollars} for row in plan.facts["comparison"]]
    layers = [*plan.facts["layers"][:2], plan.facts["layers"][2] | {"kept": script}]
    facts = {
        "settings": {quote: script, "a\ud800b": template},
        "layers": layers,
        "comparison": rows,
    }
    facts |= {"model": {"type": script, "sha256": quote}, "others": [{"layer": 7, "why": quote}]}
    page = htmlreport.render(changed(plan, **facts), f"{script}{quote}\x1b[31m\u202egnp.exe")
    found = HtmlPage(page)
    assert all(char == "\n" or char >= " " for char in page) and "\u202e" not in page
    assert "script" not in [tag for tag, _ in found.tags]
    assert not any(key.startswith("on") for _, attributes in found.tags for key in attributes)
    assert found.text.count(dollars) >= 2 * len(rows)  # in both figures and the table
    for text in (script, quote, template, "a?b"):
        assert text in found.text, text


def measured(plan: CachePlan, **facts: Any) -> CachePlan:
    return changed(plan, measured=plan.facts["measured"] | facts)


def test_eight_tokens_are_no_verdict() -> None:
    plan = measured(example_plan(kl=0.001), scored=8, passages=2, top1=1.0)
    kind, mark, sentence, further = verdict(plan)
    assert (kind, mark) == ("notice", "Too little text for a verdict.")
    assert "the same next token in 100 ± 11 % of cases (KL 0.001 nats" in sentence
    assert further[0] == (
        "Only 8 tokens of 2 passages were scored: 256 or more of 4 passages or more are needed "
        "(--windows, --scored, a longer text)."
    )
    another = "kvquant calibrate MODEL --text FILE --max-kl 0.01 -o p-measured.safetensors"
    assert ("make one that is measured", another) in next_steps(plan, "p.safetensors")
    assert verdict(measured(plan, scored=256, passages=3))[0] == "notice"
    assert verdict(measured(plan, scored=255, passages=4))[0] == "notice"
    assert verdict(measured(plan, scored=256, passages=4))[:2] == ("good", "Fit for use.")
    assert verdict(measured(plan, kl=0.3))[0] == "bad"  # of that a few are enough


def test_a_verdict_allows_for_the_standard_error() -> None:
    plan = measured(example_plan(kl=0.04, max_kl=None), passages=8, kl_error=0.002)
    assert verdict(plan)[0] == "good"
    assert verdict(measured(plan, kl_error=0.006))[:2] == ("notice", "Noticeable loss.")
    assert verdict(measured(plan, kl_error=math.nan))[0] == "notice"
    plan = measured(example_plan(kl=0.0096), passages=8, kl_error=0.0003, top1_error=0.004)
    sentence = verdict(plan)[2]
    assert "in 95.4 ± 0.4 % of cases (KL 0.0096 ± 0.0003 nats" in sentence
    assert "within the limit of 0.01 by less than two standard errors" in sentence
    values = [(value, note) for value, _, note in htmlreport._tiles(plan)]
    assert values[1] == ("0.0096", "± 0.0003; 0: equal predictions")  # in large type it would wrap


def test_what_to_do_next_is_told() -> None:
    good, bad = example_plan(), example_plan(kl=2.3, max_kl=None)
    assert next_steps(good, "my plan.safetensors") == [
        (
            "use it in your own loop (model is a CachedModel)",
            "cache = model.new_cache(1, 4096, plan='my plan.safetensors')",
        ),
        (
            "use it in generate (model is of transformers)",
            "cache = QuantizedCache(model, plan='my plan.safetensors')",
        ),
        ("see it", "kvquant report 'my plan.safetensors' -o 'my plan.html'"),
    ]
    assert [what for what, _ in next_steps(bad, "p.safetensors")] == ["allow more bits", "see it"]
    limit = {"max_kl": 0.01, "budget": 4.5, "met": False}
    (_, line), *_ = next_steps(changed(bad, limit=limit), "p.safetensors")
    assert "--budget 10 --max-kl 0.01 -o p-more-bits.safetensors" in line
    assert next_steps(good, "p.safetensors", on_page=True) == next_steps(good, "p.safetensors")[:-1]
    least = changed(bad, limit=limit | {"budget": None})  # it had all the bits that it wanted
    assert [what for what, _ in next_steps(least, "p.safetensors")] == ["see it"]
    (_, line), *_ = next_steps(changed(bad, limit=limit | {"budget": 12.0}), "p.safetensors")
    assert "--budget 13 " in line  # more than what was not enough
    all_bits = changed(bad, limit=limit | {"budget": 16.0})
    assert [what for what, _ in next_steps(all_bits, "p.safetensors")] == ["see it"]
    hybrid = measured(good, in_one_pass="layer 0 is 'conv'")
    assert [what for what, _ in next_steps(hybrid, "p.safetensors")] == [
        "use it in generate (model is of transformers)",
        "see it",
    ]
    (what, line), *_ = next_steps(changed(good, measured=None), "a b.safetensors")
    assert what == "make one that is measured"
    assert line.endswith(" --max-kl 0.01 -o 'a b-measured.safetensors'")
    of_one = example_plan(max_kl=None)
    *two, kept = of_one.facts["layers"]
    for name in ("int3", "int4"):  # one format was given for all layers
        given = {side: two[0][side] | {"format": name} for side in "kv"}
        one = changed(of_one, measured=None, layers=[*(each | given for each in two), kept])
        (_, line), *_ = next_steps(one, "p.safetensors")
        assert f" --text FILE --format {name} -o " in line
    *_, (_, line) = next_steps(good, "-o.safetensors")  # no option
    assert line == "kvquant report ./-o.safetensors -o ./-o.html"


def test_errors_have_the_digits_of_what_they_belong_to() -> None:
    pairs = [
        (0.00664, 0.00042),
        (0.0213, 0.0021),
        (2.318, 0.4),
        (0.5, 0.0),
        (0.0, 0.1),
        (1.0, None),
    ]
    assert [kl_text({"kl": kl, "kl_error": error}) for kl, error in pairs] == [
        "0.0066 ± 0.0004",
        "0.021 ± 0.002",
        "2.32 ± 0.40",
        "0.5",
        "0",
        "1.00",
    ]
    shares = [(1.0, 0.11), (0.9539, 0.0081), (0.9996, 0.0004)]
    assert [percent(*pair) for pair in shares] == ["100 ± 11 %", "95.4 ± 0.8 %", "99.96 ± 0.04 %"]


def test_numbers_keep_the_digits_that_matter() -> None:
    assert [number(x) for x in (0.00664, 2.318, 0.0, -1e-9, 1e-4, float("nan"))] == [
        "0.0066",
        "2.32",
        "0",
        "0",
        "0.0001",
        "NaN",
    ]
    assert [percent(x) for x in (1.0, 0.99971, 0.9539, 0.3625)] == [
        "100.0 %",
        "over 99.9 %",
        "95.4 %",
        "36.2 %",
    ]


@pytest.mark.extra("report")
def test_the_command_writes_the_page(tmp_path: Path) -> None:
    source, output = tmp_path / "plan.safetensors", tmp_path / "report.html"
    example_plan(2, 1).save(source)
    result = CliRunner().invoke(report, [str(source), "-o", str(output)], catch_exceptions=False)
    assert result.output.startswith("Fit for use. The cache is ")
    assert str(output) in result.output.splitlines()[-1]
    assert output.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "plan.safetensors"
    example_plan(2, 1).save(source)
    for name, words in (("x.pdf", "name it NAME.html"), ("no/x.html", "not a folder")):
        with pytest.raises(ConfigError, match=words):
            CliRunner().invoke(
                report, [str(source), "-o", str(tmp_path / name)], catch_exceptions=False
            )


def test_where_no_layer_was_measured_alone_bits_are_shown_without_costs() -> None:
    pytest.importorskip("matplotlib", reason="needs the report extra")
    plan = example_plan()
    some, none = figures.layers(plan), figures.layers(changed(plan, sensitivity=[]))
    assert all(
        "axes_2" in one and "axes_2" not in other for one, other in zip(some, none, strict=True)
    )


def test_the_kl_as_used_comes_first_and_that_without_the_window_behind_it() -> None:
    figures_of = {"kl": 0.001, "kl_error": 1e-4, "top1": 0.99, "top1_error": 1e-3}
    windowed = figures_of | {"perplexity": 9.0, "sink_len": 4, "recent_len": 128, "bits": 6.0}
    plan = changed(example_plan(), windowed=windowed)
    sentence = verdict(plan)[2]
    used = "KL 0.0010 ± 0.0001 nats per token with the first 4 and last 128 tokens in 16 bit"
    assert f"99.0 ± 0.1 % of cases ({used}; without them KL 0.0066" in sentence
    lines = render_plan(plan).splitlines()
    used, bare = (line for line in lines if line.startswith("this plan"))
    assert used.startswith("this plan + 4") and "0.00660" in bare


def test_the_error_of_a_difference_is_that_of_the_passages_differences() -> None:
    """Passages differ far more than the two caches do in any of them."""
    one = {"kl_passages": [0.1, 0.2, 0.6], "kl_error": 0.15}
    other = {"kl_passages": [0.11, 0.21, 0.61], "kl_error": 0.15}
    assert paired_error(one, other) == pytest.approx(0, abs=1e-12)
    older = {"kl_error": 0.2}
    assert paired_error(one, older) == pytest.approx(0.25)
