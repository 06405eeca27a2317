"""The report of a plan: one HTML page that needs nothing else, the verdict first.

It is written for someone who sees the tool for the first time: what was decided, what it costs,
whether to use it; then the figures, each with a sentence that tells how to read it, and tables of
the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from kvquant.plan import CachePlan

from . import figures
from .htmlstyle import STYLE
from .report import warnings
from .verdict import number, percent, verdict

Section = tuple[str, str, Callable[[CachePlan], str], str]  # title, sentence, figure, tensor needed

SECTIONS: Sequence[Section] = (
    (
        "Formats compared",
        "The same held text decoded from caches of one format for all layers. Lower is better, and "
        "further left is smaller; filled marks use the plan's transforms.",
        figures.comparison,
        "",
    ),
    (
        "What each step brings",
        "Error of int4 rows, weighted by what attention makes of it, after each step (at the end, "
        "if it says so, that of the plan's own formats). A thin line is one KV head of one layer; "
        "one that ends far above the others is a head to look at.",
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
        "Left: what every layer is given. Right: the loss of predictions when that layer alone is "
        "quantized, by which the formats were chosen.",
        figures.layers,
        "",
    ),
    (
        "Score range",
        "The scores that softmax meets, by layer. A kernel may take phi as their maximum and "
        "recompute the few queries for which it is too far off.",
        figures.scores,
        "scores.phi",
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
        UnsupportedError: matplotlib is not installed.
    """
    figures.check_matplotlib()
    facts = plan.facts
    kind, mark, sentence, further = verdict(plan)
    model = facts["model"]
    shape = f"{plan.num_layers} layers, {plan.num_kv_heads} KV heads of {plan.head_dim} channels"
    parts = [
        f"<header><h1>KV cache plan for a {escape(str(model['type']))} model</h1>"
        f"<p class=sub>{shape} · {escape(name)} · model {escape(str(model['sha256'])[:12])}</p>"
        "</header>",
        f'<section class="verdict {kind}"><p><b>{mark}</b> {escape(sentence)}</p>'
        + "".join(f"<p class=more>{escape(text)}</p>" for text in further)
        + "</section>",
        _tiles(plan),
    ]
    notes = "".join(f"<li>{escape(text)}</li>" for text in warnings(plan))
    parts += [f"<ul class=warning>{notes}</ul>"] if notes else []
    for title, words, draw, needed in SECTIONS:
        if needed and needed not in plan.tensors:
            continue
        table = _comparison_table(plan) if draw is figures.comparison else ""
        parts.append(
            f"<section><h2>{title}</h2><p>{words}</p>"
            f'<figure role=img aria-label="{title}: {escape(words)}">{draw(plan)}</figure>'
            f"{table}</section>"
        )
    parts += [_layer_table(plan), _method(plan)]
    title = f"kvquant report: {escape(name)}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{title}</title>\n<style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(parts)
        + "\n</main></body></html>\n"
    )


def _tiles(plan: CachePlan) -> str:
    """The four numbers of the verdict, large."""
    measured = plan.facts["measured"]
    if measured is None:
        return ""
    exact, given = measured["exact_perplexity"], measured["perplexity"]
    tiles = (
        (
            f"{plan.bits:.2f}",
            "bits per element",
            f"{16 / plan.bits:.1f}x smaller",
        ),
        (number(measured["kl"]), "KL, nats per token", "0: the same predictions"),
        (percent(measured["top1"]), "top-1 agreement", "same likeliest next token"),
        (f"{given:.2f}", "perplexity", f"{exact:.2f} in 16 bit"),
    )
    cells = "".join(
        f"<div><dt>{label}</dt><dd>{value}</dd><dd class=note>{note}</dd></div>"
        for value, label, note in tiles
    )
    return f"<dl class=tiles>{cells}</dl>"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    head = "".join(f"<th scope=col>{escape(cell)}</th>" for cell in header)
    body = "".join(
        f"<tr><th scope=row>{escape(row[0])}</th>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return (
        f"<div class=scroll><table><caption>{escape(caption)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _comparison_table(plan: CachePlan) -> str:
    """A row for every format: without a plan → with its transforms."""
    found = {(row["format"], bool(row["plan"])): row for row in plan.facts["comparison"]}
    bits = {row["format"]: row["bits"] for row in plan.facts["comparison"]}
    rows = []
    for name in sorted(bits, key=lambda name: (bits[name], name)):
        pair = [found.get((name, planned)) for planned in (False, True)]
        cells = [name, f"{bits[name]:.2f}"]
        cells += [
            _arrow([None if row is None else words(row[key]) for row in pair])
            for key, words in (("kl", number), ("top1", percent), ("perplexity", "{:.2f}".format))
        ]
        for side in "kv":
            kinds = (f"{side}.format_error_plain.{name}", f"{side}.format_error.{name}")
            errors = [plan.tensors.get(kind) for kind in kinds]
            cells.append(
                _arrow([None if x is None else number(float(x.nanmean())) for x in errors])
            )
        rows.append(cells)
    header = ["format", "bits", "KL", "top-1", "perplexity", "K error", "V error"]
    words = "One format for all layers, without a plan → with its transforms"
    return _details("As a table", _table(header, rows, words))


def _arrow(pair: Sequence[str | None]) -> str:
    known = [words for words in pair if words is not None]
    return " → ".join(known)


def _layer_table(plan: CachePlan) -> str:
    header = ["layer", "K", "V", "K error", "V error", "K clip", "V clip", "phi"]
    rows, places = [], plan.places
    for layer, entry in enumerate(plan.facts["layers"]):
        cells = [str(places[layer])]
        cells += [_side_words(entry[side]) for side in "kv"]
        cells += [_error_words(plan, layer, side) for side in "kv"]
        cells += [_clip_words(plan, layer, side, entry) for side in "kv"]
        rows.append([*cells, _phi_words(plan, layer)])
    words = (
        "Errors: mean over the KV heads, int4 rows as they are → after the last step. Clip: "
        "mean share of a row's range that is kept. Phi: the reference maximum of the scores, and "
        "the share of queries that are too far from it."
    )
    others = [f"{one['layer']} ({one['why']})" for one in plan.facts.get("others", [])]
    if others:
        words += (
            f" Not in the cache: layers {', '.join(others)}. The figures count the layers of the "
            "cache from 0."
        )
    table = _table(header, rows, words)
    few = " open" if plan.num_layers <= 16 else ""
    return f"<section><h2>What was decided</h2>{_details('Every layer', table, few)}</section>"


def _side_words(side: Mapping[str, Any]) -> str:
    words = [str(side["format"])]
    words += [str(side["basis"])] if side["basis"] != "none" else []
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


def _phi_words(plan: CachePlan, layer: int) -> str:
    if "scores.phi" not in plan.tensors:
        return ""
    phi, beyond = (float(plan.tensors[f"scores.{n}"][layer]) for n in ("phi", "phi_overflow"))
    return f"{phi:.1f} ({100 * beyond:.2g} %)"


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
        words += (
            f" Measured on held text: {measured['scored']:,} tokens after {measured['context']:,} "
            "tokens of context, fed one by one; all before them is read from the quantized cache, "
            f"with {ends}. KL and top-1 compare each prediction with that of the 16-bit cache; "
            "bits count the packed rows with their scales."
        )
    settings = [[str(key), str(value)] for key, value in facts["settings"].items()]
    table = _table(["setting", "value"], settings, "Settings")
    return (
        f"<section><h2>How it was measured</h2><p>{escape(words)}</p>"
        f"{_details('Settings', table) if settings else ''}</section>"
    )


def _details(summary: str, content: str, opened: str = "") -> str:
    return f"<details{opened}><summary>{summary}</summary>{content}</details>"
