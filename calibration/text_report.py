"""What calibration tells in a terminal: tables, and warnings in plain words."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvquant.io.plan import CachePlan
from kvquant.text import Column, render_table, spans

from .fidelity import with_window

KL_LIMIT = 0.1  # nats per token; int4 rows cost a few hundredths where they work at all
KL_NOTICE = 0.05  # above it the loss is worth a look
SIDES = ("K", "V"), ("latents", "RoPE parts")  # of heads, and of latent rows
COLUMNS = (
    Column("cache", left=True),
    *map(Column, ("bits", "smaller", "KL, nats\na token", "±", "top-1 %", "±", "perplexity")),
)


def render_plan(plan: CachePlan) -> str:
    """What a plan costs and keeps beside plain formats, and the formats of its layers.

    The first row is the 16-bit cache, which the others are compared with. What follows a figure in
    the column of ± is its standard error.
    """
    facts = plan.facts
    shown = [
        one
        for one in facts["comparison"]
        if not (one["plan"] and plan.formats == plan.with_formats(one["format"]).formats)
    ]
    rows = [
        _row(f"{one['format']}{' + bases' if one['plan'] else ', plain'}", one["bits"], one)
        for one in shown
    ]
    if facts["measured"]:
        rows.insert(0, _row("this plan", plan.bits, facts["measured"]))
    if windowed := facts.get("windowed"):  # as the plan is used: before all others
        name = with_window("this plan", windowed["sink_len"], windowed["recent_len"])
        rows.insert(0, _row(name, windowed["bits"], windowed))
    if facts["measured"]:
        exact = f"{facts['measured']['exact_perplexity']:.3f}"
        rows.insert(0, ["16 bit", "16.00", "1.00x", "-", "-", "-", "-", exact])
    table = [render_table(COLUMNS, rows), ""] if rows else []
    if any(one["plan"] for one in shown):
        table += ["+ bases: one format for all layers, rows transformed as in this plan", ""]
    alike: dict[str, list[int]] = {}
    for layer, entry in zip(plan.places, facts["layers"], strict=True):
        kept = f" ({entry['kept']})" if entry["kept"] else ""
        k, v = SIDES[plan.is_latent]
        text = f"{k} {entry['k']['format']}, {v} {entry['v']['format']}{kept}"
        alike.setdefault(text, []).append(layer)
    for one in facts.get("others", []):
        alike.setdefault(f"not in the cache ({one['why']})", []).append(one["layer"])
    for text, layers in alike.items():
        table.append(f"{'layer' if len(layers) == 1 else 'layers'} {spans(layers)}: {text}")
    table += _gain(plan) + _steepness(plan)
    return "\n".join(table)


def _steepness(plan: CachePlan) -> list[str]:
    """A table of how unlike the directions of each layer's rows are, behind an empty line; nothing
    of plans that were made before it was measured."""
    found = plan.facts.get("steepness", [])
    k, v = SIDES[plan.is_latent]
    columns = Column("layer"), Column(f"steepness\nof {k}"), Column(f"steepness\nof {v}")
    rows = [
        [str(layer), f"{one['k']:.2f}", f"{one['v']:.2f}"]
        for layer, one in zip(plan.places, found, strict=False)
    ]
    return ["", render_table(columns, rows)] if rows else []


def refusal(plan: CachePlan) -> str | None:
    """A sentence if the plan does not keep its limit, with the layers that cost the most."""
    limit, measured = plan.facts["limit"], plan.facts["measured"]
    if limit["met"] or not measured:
        return None
    within = f" within {limit['budget']:g} bits" if limit["budget"] else ""
    places = plan.places
    worst = [places[at] for at in plan.facts["blamed"]]
    costliest = f"{_layers(worst)} the most" if worst else "all layers are in 16 bit"
    return (
        f"the limit of {limit['max_kl']:g} nats per token is not met{within}: the best plan has a "
        f"KL of {measured['kl']:.4g} at {plan.bits:.2f} bits per element; "
        f"{costliest}. Allow more, or keep some tokens in 16 bit (sink_len, recent_len)"
    )


def warnings(plan: CachePlan) -> list[str]:
    """Say in plain words what this model does not bear, and why; nothing if it bears all."""
    found = []
    entries: Iterable[tuple[str, Mapping[str, Any] | None]] = [
        *(
            (f"{one['format']} rows without a plan", one)
            for one in plan.facts["comparison"]
            if not one["plan"]
        ),
        ("this plan", plan.facts["measured"]),
    ]
    for name, one in entries:
        if one is None:
            found.append(
                f"{name} was not measured: give --text to have its predictions compared with those "
                "of the 16-bit cache"
            )
        elif not one["kl"] <= KL_LIMIT:  # NaN too
            found.append(
                f"{name}: KL {one['kl']:.2f} nats per token, only {100 * one['top1']:.0f} % of the "
                "likeliest tokens are the same: do not decode this model from such a cache"
            )
        elif one["kl"] > KL_NOTICE:
            found.append(
                f"{name}: KL {one['kl']:.3f} nats per token, {100 * one['top1']:.0f} % of the "
                "likeliest tokens are the same: a noticeable loss; take more bits if you can"
            )
    places = plan.places
    found += [
        f"layer {layer} is kept in 16 bit: {entry['kept']}"
        for layer, entry in zip(places, plan.facts["layers"], strict=True)
        if entry["kept"]
    ]
    found += [
        f"layer {one['layer']} is not in the cache: {one['why']}"
        for one in plan.facts.get("others", [])
    ]
    if plan.facts["measured"] and plan.facts["measured"].get("in_one_pass"):
        found.append(
            f"this model cannot decode from a KVCache ({plan.facts['measured']['in_one_pass']}): "
            "use the plan with QuantizedCache"
        )
    few = any(fmt.bits == 2 for fmt in (*plan.k_formats, *plan.v_formats))
    if few and not plan.facts.get("windowed"):
        found.append(
            "this plan has rows of 2 bits and was not measured with the window that they need: "
            "keep the first and last tokens in 16 bit (--sink-len 4 --recent-len 128, and a longer "
            "--context), here and in the cache"
        )
    return found


def nearest_plain(plan: CachePlan) -> Mapping[str, Any] | None:
    """The figures of the plain format of about as many bits as the plan; None if none was
    measured."""
    plain = [row for row in plan.facts["comparison"] if not row["plan"]]
    return min(plain, key=lambda row: (abs(row["bits"] - plan.bits), row["bits"]), default=None)


def paired_error(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """The standard error of a difference of two KLs on the same passages; what both errors make
    where the KLs of passages are not known."""
    first: Sequence[float] = one.get("kl_passages") or ()
    second: Sequence[float] = other.get("kl_passages") or ()
    if len(first) < 2 or len(second) < 2:
        return math.hypot(*(float(figures.get("kl_error") or 0) for figures in (one, other)))
    differences = [a - b for a, b in zip(first, second, strict=True)]
    error: float = statistics.stdev(differences) / math.sqrt(len(differences))
    return error


def _gain(plan: CachePlan) -> list[str]:
    """What the plan brought beside the plain rows of about as many bits, behind an empty line;
    nothing where that was not measured."""
    measured, plain = plan.facts["measured"], nearest_plain(plan)
    if measured is None or plain is None:
        return []
    pays = plain["kl"] - measured["kl"] > 2 * paired_error(plain, measured)
    kls = (
        f"KL {measured['kl']:.2g} with the plan, {plain['kl']:.2g} in plain {plain['format']} rows"
    )
    return ["", f"{kls} ({'use it' if pays else 'no certain gain'})"]


def _row(name: str, bits: float, figures: Mapping[str, Any]) -> list[str]:
    kl_error, top1_error = figures.get("kl_error"), figures.get("top1_error")
    return [
        name,
        f"{bits:.2f}",
        f"{16 / bits:.2f}x",
        f"{figures['kl']:.5f}",
        "-" if kl_error is None else f"{kl_error:.5f}",
        f"{100 * figures['top1']:.2f}",
        "-" if top1_error is None else f"{100 * top1_error:.2f}",
        f"{figures['perplexity']:.3f}",
    ]


def _layers(places: Sequence[int]) -> str:
    """Subject and verb: "layer 3 costs", "layers 3 and 5 cost"."""
    if len(places) == 1:
        return f"layer {places[0]} costs"
    words = ", ".join(map(str, places[:-1]))
    return f"layers {words} and {places[-1]} cost"
