"""The report of a plan: its words, its figures, the command (5 s)."""

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
from kvquant.calibration.report import notes, render, sections
from kvquant.calibration.verdict import judge, next_steps, paired_error, plus_minus, verdict
from kvquant.cli.report import report
from kvquant.errors import CheckpointError
from kvquant.io.plan import CachePlan
from kvquant.io.plan_store import RUINED, SAFE
from kvquant.report.page import text

FIGURES = 2
ROW: dict[str, Any] = {"bits": 4.25, "kl": 0.0002, "kl_error": 3e-5, "top1": 0.99}
ROW |= {"top1_error": 0.004, "perplexity": 15.0, "kl_passages": []}


def changed(plan: CachePlan, **facts: Any) -> CachePlan:
    return replace(plan, facts={**plan.facts, **facts})


def measured(plan: CachePlan, **facts: Any) -> CachePlan:
    return changed(plan, measured=plan.facts["measured"] | facts)


def plain(**facts: Any) -> dict[str, Any]:
    return {"format": "int4", "plan": False} | ROW | facts


@pytest.fixture(scope="module")
def page() -> str:
    pytest.importorskip("matplotlib", reason="needs the report extra")
    return render(example_plan(), "plan <1>.safetensors")


def test_the_page_stands_alone_and_is_whole(page: str) -> None:
    names = [tag for tag, _ in HtmlPage(page).tags]
    assert names.count("svg") == names.count("figure") == FIGURES
    assert_stands_alone(page)
    assert figures.comparison(example_plan()) in page, "drawn once more it is the same"


def test_figures_take_the_colours_of_the_page(page: str) -> None:
    assert "var(--ink)" in page and "prefers-color-scheme: dark" in page
    assert "#010203" not in page and "#040506" not in page
    assert "#3b82c4" in page  # data keep theirs


def test_page_and_terminal_tell_the_same(page: str) -> None:
    shown = " ".join(HtmlPage(page).text.split())
    assert shown.index("Fit for use.") < shown.index("What to do next") < shown.index("compared")
    assert "KL 0.0066 ± 0.0002 nats per token, within the limit of 0.01" in shown
    printed = text(sections(example_plan()))
    for words in (
        "8,192 others scored after 2,048 tokens of context in 8 passages",
        "in 16 bit: its rows are 72 wide",
        "int8, matrix",
        "small loss",
        "15.025",
    ):
        assert words in shown and words in " ".join(printed.split()), words
    assert max(map(len, printed.splitlines())) <= 80


def test_the_table_names_each_cache_with_its_figures_and_a_verdict() -> None:
    good = plain(format="int8", bits=8.25)
    bad = plain(kl=2.318, kl_error=None, top1=0.3625, perplexity=161.0)
    lines = text(sections(changed(example_plan(), comparison=[good, bad]))).splitlines()
    found = [line.split() for line in lines if "plain" in line or line.startswith("16 bit ")]
    assert found == [
        "16 bit 16.00 - - - 15.025".split(),
        "int8, plain 8.25 0.00020 0.00003 99.00 15.000 safe".split(),
        "int4, plain 4.25 2.31800 - 36.25 161.000 too close to tell".split(),
    ]


def test_a_plan_of_one_format_is_printed_once() -> None:
    side = {"format": "int4", "basis": "none", "rounding": "nearest"}
    comparison = [plain(plan=planned) for planned in (False, True)]
    entries = [{"k": side, "v": side, "kept": None}] * 3
    printed = text(sections(changed(example_plan(), layers=entries, comparison=comparison)))
    assert "int4, plain" in printed and "this plan" in printed and "int4 + bases" not in printed
    assert [line.split() for line in printed.splitlines()[-3:]][::2] == [
        ["layers", "K", "V"],
        ["0-2", "int4", "int4"],
    ]


def test_a_plan_is_represented_in_a_line() -> None:
    assert repr(example_plan()) == (
        "CachePlan(qwen2, 3 layers, K bf16/int4, V bf16/int4/int8, 9.00 bits per element, "
        "KL 0.0066 nats per token)"
    )


@pytest.mark.extra("report")
def test_a_plan_without_text_has_fewer_figures() -> None:
    plan = example_plan()
    tensors = {name: plan.tensors[name] for name in ("k.offset", "v.offset")}
    plan = CachePlan({**plan.facts, "zero_data": True, "measured": None}, tensors)
    found = HtmlPage(render(plan, "plan.safetensors"))
    assert [tag for tag, _ in found.tags].count("svg") == 1  # layers
    assert "Not measured." in found.text and "32,768 random tokens observed." in found.text


def test_the_verdict_follows_the_measure() -> None:
    for plan, kind, mark in (
        (example_plan(), "good", "Fit for use."),
        (example_plan(kl=0.03, met=False), "bad", "Limit not met."),
        (example_plan(kl=0.06, max_kl=None), "notice", "Noticeable loss."),
        (example_plan(kl=SAFE, max_kl=None), "notice", "Too close to tell."),
        (example_plan(kl=2.3, max_kl=None), "bad", "Do not decode from this cache."),
        (example_plan(kl=float("nan"), max_kl=None), "bad", "Do not decode from this cache."),
        (measured(example_plan(kl=0.001), scored=255), "notice", "Too little text for a verdict."),
        (measured(example_plan(kl=0.001), passages=3), "notice", "Too little text for a verdict."),
        (measured(example_plan(kl=0.001), scored=256, passages=4), "good", "Fit for use."),
        (measured(example_plan(kl=2.3), scored=8), "bad", "Do not decode from this cache."),
    ):
        found = verdict(plan)
        assert (found.kind, found.mark) == (kind, mark), plan
        blamed = "Most of it comes from layer 1, layer 0" in " ".join(found.further)
        assert blamed == (kind == "bad"), plan


def test_one_pair_of_limits_and_their_errors() -> None:
    assert [judge(kl, 0.001) for kl in (0.008, 0.0081, 0.0121, 0.0979, 0.1, 0.1021)] == [
        *("safe", "too close to tell", "small loss", "small loss", "too close to tell"),
        "do not use",
    ]
    assert judge(SAFE, 0.0) == "safe" and judge(RUINED, 0.0) == "do not use"


def test_the_verdict_tells_times_tokens_and_errors() -> None:
    plan = measured(example_plan(kl=0.0066), kl_error=0.0003, top1_error=0.004)
    said = verdict(plan)
    assert "in 95.4 ± 0.4 % of cases (KL 0.0066 ± 0.0003 nats" in said.sentence
    few = verdict(measured(plan, scored=8, passages=2))
    assert few.further[0] == (
        "Only 8 tokens of 2 passages were scored: 256 or more of 4 passages or more are needed "
        "(--windows, --scored, a longer text)."
    )
    all_exact = verdict(changed(plan, layers=[plan.facts["layers"][-1]] * 3))
    assert "1.0 times smaller" in all_exact.sentence and len(all_exact.further) == 1


def test_the_verdict_is_on_the_cache_as_it_is_used() -> None:
    window = {"sink_len": 4, "recent_len": 128}
    plan = changed(example_plan(kl=0.05), windowed=ROW | window | {"kl": 0.001, "bits": 6.0})
    said = verdict(plan)
    used = "KL 0.001 ± 3e-05 nats per token with the first 4 and last 128 tokens in 16 bit"
    assert (
        said.kind == "good"
        and f"({used}, within the limit of 0.01; without them KL 0.05" in said.sentence
    )
    lines = text(sections(plan)).splitlines()
    used, bare = (line for line in lines if line.startswith("this plan"))
    assert used.startswith("this plan + 4") and "0.05000" in bare


def test_what_a_plan_brings_is_what_was_measured() -> None:
    for kl, error, words in (
        (0.5, 0.01, "KL 0.5 ± 0.01. The plan is better."),
        (0.007, 0.001, "KL 0.007 ± 0.001. The plan brings no certain gain."),
        (0.001, None, "KL 0.001. The plan brings no certain gain."),
    ):
        plan = changed(example_plan(), comparison=[plain(kl=kl, kl_error=error)])
        told = f"Plain int4 rows (4.25 bits), without 16-bit tokens: {words}"
        assert verdict(plan).further == [told]
    assert verdict(changed(plan, comparison=[])).further == []


def test_the_error_of_a_difference_is_that_of_the_passages_differences() -> None:
    """Passages differ far more than the two caches do in any of them."""
    one = {"kl_passages": [0.1, 0.2, 0.6], "kl_error": 0.15}
    other = {"kl_passages": [0.11, 0.21, 0.61], "kl_error": 0.15}
    assert paired_error(one, other) == pytest.approx(0, abs=1e-12)
    single = {"kl_passages": [0.1], "kl_error": 0.2}
    assert paired_error(one, single) == pytest.approx(0.25)


def test_figures_have_the_digits_that_matter() -> None:
    pairs = [(0.00664, 0.00042), (2.318, 0.4), (0.5, 0.0), (1.0, None), (-1e-9, None), (98.83, 1.2)]
    assert [plus_minus(*pair) for pair in pairs] == [
        *("0.0066 ± 0.0004", "2.3 ± 0.4", "0.5", "1", "0", "98.8 ± 1")
    ]
    assert plus_minus(math.nan, None) == "nan"


LOOP, GENERATE = "use it in your own loop (model is a CachedModel)", "use it in generate (model is"
ALLOW, SEE = "allow more bits", "see it"


def test_what_to_do_next_is_told() -> None:
    good, bad = example_plan(), example_plan(kl=2.3, max_kl=None)
    limit = {"max_kl": 0.01, "budget": 4.5, "met": False}
    loop, generate, see = next_steps(good, "my plan.safetensors")
    assert loop == (LOOP, "cache = model.new_cache(1, 4096, plan='my plan.safetensors')")
    assert generate == (
        f"{GENERATE} of transformers)",
        "cache = QuantizedCache(model, plan='my plan.safetensors')",
    )
    assert see == (SEE, "kvquant report 'my plan.safetensors' -o 'my plan.html'")
    assert next_steps(good, "p.safetensors", on_page=True) == next_steps(good, "p.safetensors")[:-1]

    def steps(plan: CachePlan, **facts: Any) -> dict[str, str]:
        """By the beginnings of their names."""
        found = next_steps(changed(plan, **facts), "a b.safetensors")
        return {what[: len(GENERATE)]: line for what, line in found}

    assert [*steps(bad)] == [ALLOW, SEE]
    assert "--budget 10 --max-kl 0.01 -o 'a b-more-bits" in steps(bad, limit=limit)[ALLOW]
    assert [*steps(bad, limit=limit | {"budget": None})] == [SEE]  # it had all that it wanted
    more = steps(bad, limit=limit | {"budget": 12.0})[ALLOW]
    assert "--budget 13 " in more  # more than what was not enough
    assert [*steps(bad, limit=limit | {"budget": 16.0})] == [SEE]
    assert [*steps(measured(good, in_one_pass="layer 0 is 'conv'"))] == [GENERATE, SEE]
    for little in (changed(good, measured=None), measured(good, scored=8)):
        (what, line), *_ = steps(little).items()
        assert what.startswith("measure one")
        assert line == "kvquant calibrate MODEL --text FILE -o 'a b-measured.safetensors'"
    *_, (_, line) = next_steps(good, "-o.safetensors")  # no option
    assert line == "kvquant report ./-o.safetensors -o ./-o.html"


def test_notes_are_of_what_the_verdict_leaves_out() -> None:
    assert notes(example_plan()) == []
    (told,) = notes(measured(example_plan(), in_one_pass="layer 0 is 'conv'"))
    assert "cannot decode from a KVCache (layer 0 is 'conv'): use the plan with Quant" in told


@pytest.mark.extra("report")
def test_no_string_of_a_file_is_markup_or_a_formula() -> None:
    script, quote = "<script>alert(1)</script>", "\"onload='x"
    dollars, template = "$x^2$", "{{7*7}}"
    plan = example_plan()
    rows = [row | {"format": dollars} for row in plan.facts["comparison"] if not row["plan"]]
    layers = [*plan.facts["layers"][:2], plan.facts["layers"][2] | {"kept": script}]
    facts: dict[str, Any] = {"settings": {quote: script, "a\ud800b": template}, "layers": layers}
    facts |= {
        "comparison": rows,
        "model": {"type": script, "sha256": quote},
        "others": [{"layer": 7, "why": quote}],
    }
    page = render(changed(plan, **facts), f"{script}{quote}\x1b[31m\u202egnp.exe")
    found = HtmlPage(page)
    assert all(char == "\n" or char >= " " for char in page) and "\u202e" not in page
    assert "script" not in [tag for tag, _ in found.tags]
    assert not any(key.startswith("on") for _, attributes in found.tags for key in attributes)
    assert found.text.count(dollars) >= 2 * len(rows)  # in the figure and the table
    for words in (script, quote, template, "a?b"):
        assert words in found.text, words


@pytest.mark.extra("report")
def test_the_command_writes_the_page(tmp_path: Path) -> None:
    source, output = tmp_path / "plan.safetensors", tmp_path / "report.html"
    example_plan(2, 1).save(source)
    result = CliRunner().invoke(report, [str(source), "-o", str(output)], catch_exceptions=False)
    assert result.output.startswith("Fit for use. The cache is ")
    assert str(output) in result.output.splitlines()[-1]
    assert output.read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.extra("report")
def test_facts_that_nobody_can_read_serve_caches_and_no_report(tmp_path: Path) -> None:
    source, plan = tmp_path / "plan.safetensors", example_plan()
    args, facts = [str(source), "-o", str(tmp_path / "out.html")], list[dict[str, Any]]()
    facts += [{"comparison": 5}, {"comparison": [{"plan": True}]}, {"measured": {"kl": 0.1}}]
    facts += [{"sensitivity": [{"layer": 9, "kl": "x"}]}, {"settings": [3]}]
    facts += [{"observed_tokens": "many"}]
    for one in facts:
        CachePlan({**plan.facts, **one}, plan.tensors).save(source)
        assert CachePlan.load(source).formats == plan.formats, one
        with pytest.raises(CheckpointError, match="holds facts that cannot be shown"):
            CliRunner().invoke(report, args, catch_exceptions=False)
        assert not (tmp_path / "out.html").exists(), one


def test_where_no_layer_was_measured_alone_bits_are_shown_without_costs() -> None:
    pytest.importorskip("matplotlib", reason="needs the report extra")
    plan = example_plan()
    some, none = figures.layers(plan), figures.layers(changed(plan, sensitivity=[]))
    assert "axes_2" in some and "axes_2" not in none
