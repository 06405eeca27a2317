"""The report of a plan: one HTML page that needs nothing else, the verdict first.

It is written for someone who sees the tool for the first time: what was decided, what it costs,
whether to use it; then the figures, each with a sentence that tells how to read it, and tables of
the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvquant.html import page
from kvquant.html.figure import Drawn
from kvquant.html.page import Section, Table, Verdict
from kvquant.io.plan import CachePlan

from . import figures
from .text_report import SIDES, warnings
from .verdict import kl_text, next_steps, number, percent, top1_error, verdict

# title, words, figure, the tensor that it needs
Figure = tuple[str, str, Callable[[CachePlan], Drawn], str]
FIGURES: Sequence[Figure] = (
    (
        "Formats compared",
        "The same held-out text decoded from caches of one format for all layers. Lower is better, "
        "and further left is smaller; filled marks use the plan's transforms. Bars: standard "
        "errors.",
        figures.comparison,
        "",
    ),
    (
        "What each step brings",
        "Error of int4 rows after each step, weighted by what attention makes of it. Where the "
        "plan has other formats too, the last point (the plan) is the error of rows in these. A "
        "thin line is one KV head of one layer; one that ends far above the others is a head to "
        "look at.",
        figures.steps,
        "k.error.plain",
    ),
    (
        "Layer by layer, head by head",
        "The same errors by place. Yellow cells on the left that turn dark on the right are heads "
        "that the plan has saved; grey ones are kept in 16 bit.",
        figures.heads,
        "k.error.plain",
    ),
    (
        "Outlier channels",
        "Size of every channel (root mean square) over the typical deviation of its head. Bright "
        "columns are channels that would take most of a row's 4-bit codes; on the right, as "
        "stored, there should be none.",
        figures.channels,
        "k.stored.std",
    ),
    (
        "Bits of each layer",
        "What every layer is given, and where formats were chosen the loss of predictions when "
        "that layer alone is quantized.",
        figures.layers,
        "",
    ),
)


def render(plan: CachePlan, name: str) -> str:
    """Write the report.

    Args:
        plan: what calibration found.
        name: of the plan's file.

    Returns:
        The HTML page.

    Raises:
        UnsupportedError: matplotlib or jinja2 is not installed.
    """
    page.check_libraries("kvquant report")
    model = plan.facts["model"]
    shape = f"{plan.num_layers} layers, {plan.num_kv_heads} KV heads of {plan.head_dim} channels"
    figures_of_plan = [
        Section(
            title,
            words,
            drawn=draw(plan),
            tables=[_comparison_table(plan)] if draw is figures.comparison else (),
        )
        for title, words, draw, needed in FIGURES
        if not needed or needed in plan.tensors
    ]
    settings = [["setting", "value"], *map(list, plan.facts["settings"].items())]
    return page.render(
        page.Page(
            f"kvquant report: {name}",
            f"KV cache plan for a {model['type']} model",
            f"{shape} · {name} · model {str(model['sha256'])[:12]}",
            Verdict(*verdict(plan)),
            _tiles(plan),
            warnings(plan),
            [
                Section("What to do next", steps=next_steps(plan, name, on_page=True)),
                *figures_of_plan,
                Section("What was decided", tables=[_layer_table(plan)]),
                Section(
                    "How it was measured",
                    _method(plan),
                    tables=[Table("Settings", settings, "Settings")] if len(settings) > 1 else (),
                ),
            ],
        )
    )


def _tiles(plan: CachePlan) -> list[tuple[str, str, str]]:
    """The four numbers of the verdict: value, what it is, a note."""
    measured = plan.facts["measured"]
    if measured is None:
        return []
    exact, given = measured["exact_perplexity"], measured["perplexity"]
    error = top1_error(measured, plan)
    kl, _, kl_error = kl_text(measured).partition(" ± ")  # both in large type would wrap
    kl_spread = f"± {kl_error}; " if kl_error else ""
    spread = f"± {100 * error:.2g}: " if error is not None else ""
    return [
        (f"{plan.bits:.2f}", "bits per element", f"{16 / plan.bits:.1f}x smaller"),
        (kl, "KL, nats per token", f"{kl_spread}0: equal predictions"),
        (percent(measured["top1"]), "top-1 agreement", f"{spread}same likeliest next token"),
        (f"{given:.2f}", "perplexity", f"{exact:.2f} in 16 bit"),
    ]


def _comparison_table(plan: CachePlan) -> Table:
    """A row for every format: without a plan → with its transforms; the 16-bit cache first."""
    found = {(row["format"], bool(row["plan"])): row for row in plan.facts["comparison"]}
    bits = {row["format"]: row["bits"] for row in plan.facts["comparison"]}
    rows = [["format", "bits", "KL", "top-1", "perplexity", "K error", "V error"]]
    if plan.facts["measured"]:
        exact = f"{plan.facts['measured']['exact_perplexity']:.2f}"
        rows.append(["16 bit", "16.00", "0", "100 %", exact, "", ""])
    for name in sorted(bits, key=lambda name: (bits[name], name)):
        pair = [found.get((name, planned)) for planned in (False, True)]
        cells = [name, f"{bits[name]:.2f}"]
        columns: tuple[Callable[[Mapping[str, Any]], str], ...] = (
            kl_text,
            lambda row: percent(row["top1"], top1_error(row, plan)),
            lambda row: f"{row['perplexity']:.2f}",
        )
        cells += [
            _arrow([None if row is None else words(row) for row in pair]) for words in columns
        ]
        for side in "kv":
            kinds = (f"{side}.format_error_plain.{name}", f"{side}.format_error.{name}")
            errors = [plan.tensors.get(kind) for kind in kinds]
            cells.append(
                _arrow([None if x is None else number(float(x.nanmean())) for x in errors])
            )
        rows.append(cells)
    caption = (
        "One format for all layers, without a plan → with its transforms; ± standard error, by "
        "passages"
    )
    return Table("As a table", rows, caption)


def _arrow(pair: Sequence[str | None]) -> str:
    known = [words for words in pair if words is not None]
    return " → ".join(known)


def _layer_table(plan: CachePlan) -> Table:
    k, v = SIDES[plan.is_latent]
    rows = [["layer", *(f"{side}{what}" for what in ("", " error", " clip") for side in (k, v))]]
    for layer, entry in enumerate(plan.facts["layers"]):
        cells = [str(plan.places[layer])]
        cells += [_side_words(entry[side], plan.has_basis(layer, side)) for side in "kv"]
        cells += [_error_words(plan, layer, side) for side in "kv"]
        cells += [_clip_words(plan, layer, side, entry) for side in "kv"]
        rows.append(cells)
    base = plan.facts["candidates"][0] if plan.is_latent else "int4"
    words = (
        f"Errors: mean over the KV heads, {base} rows as they are → after the last step. Clip: "
        "mean share of a row's range that is kept."
    )
    others = [f"{one['layer']} ({one['why']})" for one in plan.facts.get("others", [])]
    if others:
        words += (
            f" Not in the cache: layers {', '.join(others)}. The figures count the layers of the "
            "cache from 0."
        )
    return Table("Every layer", rows, words, is_open=len(rows) <= 17)


def _side_words(side: Mapping[str, Any], has_basis: bool) -> str:
    words = [str(side["format"])]
    words += [str(side["basis"])] if has_basis and side["basis"] != "none" else []
    words += [str(side["rounding"])] if side["rounding"] != "nearest" else []
    return ", ".join(words)


def _error_words(plan: CachePlan, layer: int, side: str) -> str:
    names = figures.error_names(plan)
    if len(names) < 2 or plan.facts["layers"][layer]["kept"] is not None:
        return ""
    ends = (figures.errors(plan, side, name)[layer] for name in (names[0], names[-1]))
    return _arrow([number(float(x.mean())) for x in ends])


def _clip_words(plan: CachePlan, layer: int, side: str, entry: Mapping[str, Any]) -> str:
    ratios = plan.tensors.get(f"{side}.clip.{entry[side]['format']}")
    return "" if ratios is None or entry["kept"] else f"{float(ratios[layer].mean()):.2f}"


def _method(plan: CachePlan) -> str:
    facts, measured = plan.facts, plan.facts["measured"]
    kind = "random tokens, no text" if facts["zero_data"] else "tokens"
    words = f"Observed: {facts['observed_tokens']:,} {kind}."
    if measured:
        ends = "no tokens in 16 bit"
        if measured["sink_len"] or measured["recent_len"]:
            ends = (
                f"the first {measured['sink_len']} and the last {measured['recent_len']} tokens in "
                "16 bit"
            )
        passages = f" in {measured['passages']} passages" if measured.get("passages") else ""
        words += (
            f" Measured on held-out text: {measured['scored']:,} tokens after "
            f"{measured['context']:,} tokens of context{passages}, fed one by one; all before them "
            f"is read from the quantized cache, with {ends}. KL and top-1 compare each prediction "
            "with that of the 16-bit cache; bits count the packed rows with their scales. Standard "
            "errors take each passage as one observation, for tokens of one passage are alike."
        )
    return words
