"""The figures of a plan's report."""

from __future__ import annotations

from typing import Any

from kvquant.io.plan import CachePlan
from kvquant.report.figure import BLUE, INK, ORANGE, figure, log_axis
from kvquant.rows.codec import EXACT_CODECS

LEAST = 1e-7  # of a KL on a log scale, which rounding may leave at 0 or less


@figure(lambda plan: 3.2)
def comparison(page: Any, plan: CachePlan) -> None:
    """KL against bits of every format, with the plan and without."""
    axes, facts = page.subplots(), plan.facts
    measured = {"bits": plan.bits, **facts["measured"]}
    for rows, label, style in (
        ([one for one in facts["comparison"] if not one["plan"]], "plain", "o"),
        ([one for one in facts["comparison"] if one["plan"]], "+ bases", "D"),
        ([measured], "this plan", "*"),
    ):
        axes.errorbar(
            [one["bits"] for one in rows],
            [max(one["kl"], LEAST) for one in rows],
            yerr=[one["kl_error"] or 0.0 for one in rows],
            fmt=style,
            color={"o": ORANGE, "D": BLUE, "*": INK}[style],
            markerfacecolor="none" if style == "o" else None,
            markersize=13 if style == "*" else 7,
            elinewidth=1,
            label=label,
        )
        for one in rows if style != "*" else ():
            at, place = (one["bits"], max(one["kl"], LEAST)), (7, -9 if one["plan"] else 4)
            axes.annotate(one["format"], at, place, textcoords="offset points", fontsize=8)
    limit = facts["limit"]["max_kl"]
    if limit is not None:
        axes.axhline(limit, color=INK, linewidth=1, linestyle=":", label=f"limit {limit:g}")
    log_axis(axes)
    axes.set(xlabel="bits per element", ylabel="KL, nats per token (lower is better)")
    axes.margins(x=0.09, y=0.12)
    axes.grid(axis="y")
    axes.legend()


@figure(lambda plan: 2.9)
def layers(page: Any, plan: CachePlan) -> None:
    """Bits of every layer, and what quantizing only that layer costs, where that was measured."""
    from matplotlib.ticker import MaxNLocator

    alone = plan.facts["sensitivity"]
    panels = [*page.subplots(1, 2)] if alone else [page.subplots()]
    sides = (("K", BLUE, plan.k_formats, "v"), ("V", ORANGE, plan.v_formats, "k"))
    for place, (side, colour, formats, other) in enumerate(sides):
        xs = [layer + 0.38 * (place - 0.5) for layer in range(plan.num_layers)]
        style = {"color": colour, "label": side, "hatch": "////" if place else None}
        heights = [fmt.bits_per_element for fmt in formats]
        panels[0].bar(xs, heights, 0.36, edgecolor="#fff8", **style)
        costs = [
            (row["layer"], max(row["kl"], LEAST))
            for row in alone
            if row[f"{other}_format"] in EXACT_CODECS
        ]
        if costs:
            points = zip(*sorted(costs), strict=True)
            panels[1].plot(*points, marker="os"[place], linewidth=1, color=colour, label=side)
    panels[0].set(xlabel="layer", ylabel="bits per element", ylim=(0, 19), yticks=range(0, 17, 4))
    panels[0].legend(ncols=2, loc="upper right")  # above 16 bits
    for axes in panels[1:]:
        log_axis(axes)
        axes.set(xlabel="layer that alone is quantized", ylabel="KL, nats per token")
        axes.grid(axis="y")
        axes.legend()
    for axes in panels:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
