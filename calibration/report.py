"""The report of a plan: sections for the terminal and for the page of `kvquant report`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvquant.io.plan import CachePlan
from kvquant.report import page
from kvquant.report.page import Section, Table
from kvquant.text import Column, count_text, number, spans

from . import figures
from .fidelity import with_window
from .verdict import judge, next_steps, verdict

SIDES = ("K", "V"), ("latents", "RoPE parts")  # of heads, and of latent rows
COLUMNS = (
    Column("cache", left=True),
    *map(Column, ("bits", "KL, nats\na token", "±", "top-1 %", "perplexity")),
    Column("verdict", left=True),
)


def render(plan: CachePlan, name: str) -> str:
    """The HTML page of a plan; UnsupportedError if matplotlib or jinja2 is not installed."""
    page.check_libraries("kvquant report")
    model = plan.facts["model"]
    shape = f"{plan.num_layers} layers, {plan.num_kv_heads} KV heads of {plan.head_dim} channels"
    steps = Section("What to do next", steps=next_steps(plan, name, on_page=True))
    settings = [["setting", "value"], *map(list, plan.facts["settings"].items())]
    return page.render(
        page.Page(
            f"kvquant report: {name}",
            f"KV cache plan for a {model['type']} model",
            f"{shape} · {name} · model {str(model['sha256'])[:12]}",
            verdict(plan),
            notes(plan),
            [
                steps,
                *sections(plan, drawn=True),
                Section("Settings", tables=[Table("Settings", settings)]),
            ],
        )
    )


def sections(plan: CachePlan, *, drawn: bool = False) -> list[Section]:
    """What caches cost, and what was decided; with figures if drawn."""
    seen = "random tokens" if plan.facts["zero_data"] else "tokens"
    observed = f"{plan.facts['observed_tokens']:,} {seen} observed"
    cost = Section("Caches compared", f"{observed}.")
    if measured := plan.facts["measured"]:
        words = (
            f"{observed}. {measured['scored']:,} others scored after {measured['context']:,} "
            f"tokens of context in {count_text(measured['passages'], 'passage')}: KL and top-1 "
            "compare each prediction with that of the 16-bit cache. Plain: without a plan; + "
            "bases: one format for all layers, rows transformed as in this plan."
        )
        chart = figures.comparison(plan) if drawn else ""
        cost = Section("Caches compared", words, (), chart, [_comparison(plan)])
    chart = figures.layers(plan) if drawn else ""
    words = "Bits of each layer, and what it costs to quantize it alone." if drawn else ""
    return [cost, Section("What was decided", words, (), chart, [_layers(plan)])]


def notes(plan: CachePlan) -> list[str]:
    """What the user has to know about a plan besides its verdict."""
    found, measured = [], plan.facts["measured"]
    if measured and measured["in_one_pass"]:
        found.append(
            f"This model cannot decode from a KVCache ({measured['in_one_pass']}): use the plan "
            "with QuantizedCache."
        )
    few = any(fmt.bits == 2 for fmt in (*plan.k_formats, *plan.v_formats))
    if few and not plan.facts["windowed"]:
        found.append(
            "This plan has rows of 2 bits and was not measured with the window that they need: "
            "keep the first and last tokens in 16 bit (--sink-len 4 --recent-len 128, and a longer "
            "--context), here and in the cache."
        )
    return found


def _comparison(plan: CachePlan) -> Table:
    """A row for each cache: 16 bit, the plan with the window and without, one format for all."""
    facts = plan.facts
    measured, windowed = facts["measured"], facts["windowed"]
    rows = [["16 bit", "16.00", "-", "-", "-", f"{measured['exact_perplexity']:.3f}", ""]]
    if windowed:  # as the plan is used
        name = with_window("this plan", windowed["sink_len"], windowed["recent_len"])
        rows.append(_row(name, windowed["bits"], windowed))
    rows.append(_row("this plan", plan.bits, measured))
    for one in facts["comparison"]:
        if not (one["plan"] and plan.formats == plan.with_formats(one["format"]).formats):
            kind = " + bases" if one["plan"] else ", plain"
            rows.append(_row(f"{one['format']}{kind}", one["bits"], one))
    return Table("As a table", [COLUMNS, *rows])


def _row(name: str, bits: float, found: Mapping[str, Any]) -> list[str]:
    return [
        name,
        f"{bits:.2f}",
        f"{max(found['kl'], 0.0):.5f}",
        number(found["kl_error"], ".5f"),
        f"{100 * found['top1']:.2f}",
        f"{found['perplexity']:.3f}",
        judge(found["kl"], found["kl_error"]),
    ]


def _layers(plan: CachePlan) -> Table:
    """How rows are stored: a row for all layers that are alike."""
    alike: dict[tuple[str, str, str], list[int]] = {}
    for at, entry in enumerate(plan.facts["layers"]):
        k, v = (_side(entry[side], plan.has_basis(at, side)) for side in "kv")
        why = f"in 16 bit: {entry['kept']}" if entry["kept"] else ""
        alike.setdefault((k, v, why), []).append(plan.places[at])
    for one in plan.facts["others"]:
        alike.setdefault(("-", "-", f"not in the cache: {one['why']}"), []).append(one["layer"])
    head = [Column(title, left=True) for title in ("layers", *SIDES[plan.is_latent], "why")]
    last = 4 if any(why for *_, why in alike) else 3
    rows = [[spans(layers), *words][:last] for words, layers in alike.items()]
    return Table("Layers", [head[:last], *rows], is_open=True)


def _side(side: Mapping[str, Any], has_basis: bool) -> str:
    words = [str(side["format"])]
    words += [str(side["basis"])] if has_basis and side["basis"] != "none" else []
    words += [str(side["rounding"])] if side["rounding"] != "nearest" else []
    return ", ".join(words)
