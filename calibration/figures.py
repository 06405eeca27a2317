"""The figures of a plan's report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import torch

from kvquant.html.figure import BLUE, INK, ORANGE, figure, log_axis, plain_ticks
from kvquant.io.plan import CachePlan
from kvquant.rows.codec import EXACT_CODECS

SIDES = (("k", "K", BLUE), ("v", "V", ORANGE))
NAMES = {
    "plain": "as it is",
    "offset": "centred",
    "hadamard": "+ Hadamard",
    "matrix": "+ matrix",
    "clip": "+ clip search",
    "feedback": "+ feedback",
    "plan": "the plan",
}


def _two_panels(page: Any, narrow: bool, **options: Any) -> Any:
    """Two panels, beside or below each other."""
    return page.subplots(2, 1, **options) if narrow else page.subplots(1, 2, **options)


@figure(lambda plan, narrow: 3.2)
def comparison(page: Any, plan: CachePlan, narrow: bool) -> None:
    """KL against bits of every format, with the plan and without."""
    axes = page.subplots()
    shown = [(False, "o", "without a plan", ORANGE), (True, "D", "with its transforms", BLUE)]
    for with_plan, marker, label, colour in shown:
        rows = [row for row in plan.facts["comparison"] if bool(row["plan"]) == with_plan]
        points = sorted(
            (row["bits"], _positive(row["kl"]), row["format"], _error(row)) for row in rows
        )
        face = colour if with_plan else "none"
        axes.errorbar(
            [bits for bits, *_ in points],
            [kl for _, kl, *_ in points],
            yerr=[error for *_, error in points],
            fmt=marker,
            color=colour,
            markerfacecolor=face,
            markersize=7,
            elinewidth=1,
            label=label,
        )
        for x, y, name, _ in points:
            place = (7, -9) if with_plan else (7, 4)
            axes.annotate(name, (x, y), place, textcoords="offset points", fontsize=8)
    if plan.facts["measured"]:
        measured = plan.facts["measured"]
        axes.errorbar(
            plan.bits,
            _positive(measured["kl"]),
            yerr=_error(measured),
            fmt="*",
            color=INK,
            markersize=13,
            elinewidth=1,
            label="this plan",
        )
    limit = plan.facts["limit"]["max_kl"]
    if limit is not None:
        axes.axhline(limit, color=INK, linewidth=1, linestyle=":", label=f"limit {limit:g}")
    log_axis(axes)
    axes.set_xlabel("bits per element")
    axes.set_ylabel("KL, nats per token (lower is better)")
    axes.margins(x=0.09, y=0.12)
    axes.grid(axis="y")
    axes.legend()


@figure(lambda plan, narrow: 5.8 if narrow else 2.9)
def steps(page: Any, plan: CachePlan, narrow: bool) -> None:
    """The error after each transform: a line for every KV head, and the median."""
    names = error_names(plan)
    panels = _two_panels(page, narrow, sharey=True)
    for axes, (side, label, colour) in zip(panels, SIDES, strict=True):
        rows = torch.stack([errors(plan, side, name).flatten() for name in names])
        rows = rows[:, ~rows.isnan().any(0)]  # [transforms, heads]
        axes.plot(rows.numpy(), color=colour, linewidth=0.7, alpha=0.35)
        if rows.shape[1]:
            median = rows.quantile(0.5, dim=1).numpy()
            axes.plot(median, color=colour, linewidth=2.4, marker="o", label="median head")
            axes.legend()
        log_axis(axes)
        axes.set_title(f"{label}, {rows.shape[1]} KV heads")
        axes.set_xticks(range(len(names)), [NAMES.get(name, name) for name in names])
        for text in axes.get_xticklabels():
            text.set(rotation=25, ha="right", rotation_mode="anchor")
        axes.grid(axis="y")
    for axes in panels if narrow else panels[:1]:
        axes.set_ylabel("weighted relative error")


def _heads_height(plan: CachePlan, narrow: bool) -> float:
    return 2 * min(max(0.7 + 0.13 * plan.num_layers, 1.3), 4.5)


@figure(_heads_height)
def heads(page: Any, plan: CachePlan, narrow: bool) -> None:
    """The error of every layer and KV head after each transform, as heat maps of one scale."""
    names = error_names(plan)
    if narrow:  # the first and the last step
        names = names[:1] + names[1:][-1:]
    panels = page.subplots(2, len(names), sharex=True, sharey=True, squeeze=False)
    maps = {(side, name): errors(plan, side, name) for side, _, _ in SIDES for name in names}
    scale = _log_scale(list(maps.values()))
    for row, (side, label, _) in zip(panels, SIDES, strict=True):
        for axes, name in zip(row, names, strict=True):
            image = _heat(axes, maps[side, name], scale)
            if side == "k":
                axes.set_title(NAMES.get(name, name))
        row[0].set_ylabel(f"{label}: layer")
        _whole_ticks(row[0].yaxis)
    for axes in panels[1]:
        axes.set_xlabel("KV head")
        _whole_ticks(axes.xaxis)
    _colour_bar(page, image, panels, "weighted relative error")


def _channels_height(plan: CachePlan, narrow: bool) -> float:
    rows = plan.num_layers * plan.num_kv_heads
    return 2 * min(max(0.6 + 0.07 * rows, 1.3), 4.5)


@figure(_channels_height)
def channels(page: Any, plan: CachePlan, narrow: bool) -> None:
    """The size of every channel, in typical deviations of its head, as given and as stored."""
    panels = page.subplots(2, 2, sharex=True, sharey=True)
    maps = {}
    for side, _, _ in SIDES:
        mean, std = plan.tensors[f"{side}.mean"], plan.tensors[f"{side}.std"]
        stored = plan.tensors[f"{side}.stored.std"]
        maps[side, ""] = _in_deviations((mean.square() + std.square()).sqrt(), std)
        maps[side, "stored"] = _in_deviations(stored, stored)
    scale = _log_scale(list(maps.values()))
    for row, (side, label, _) in zip(panels, SIDES, strict=True):
        for axes, kind in zip(row, ("", "stored"), strict=True):
            image = _heat(axes, maps[side, kind], scale)
            axes.set_title(f"{label}, as {kind or 'given'}")
        _layer_ticks(row[0], plan)
        row[0].set_ylabel("layer")
    for axes in panels[1]:
        axes.set_xlabel("channel")
    _colour_bar(page, image, panels, "root mean square / typical deviation")


@figure(lambda plan, narrow: 5.8 if narrow else 2.9)
def layers(page: Any, plan: CachePlan, narrow: bool) -> None:
    """Bits of every layer, and what quantizing only that layer costs, where that was measured."""
    count, width, measured = plan.num_layers, 0.38, plan.facts["sensitivity"]
    bars, *others = _two_panels(page, narrow) if measured else [page.subplots()]
    for place, (side, label, colour) in zip((-0.5, 0.5), SIDES, strict=True):
        formats = plan.k_formats if side == "k" else plan.v_formats
        bits = [fmt.bits_per_element for fmt in formats]
        xs = [layer + place * width for layer in range(count)]
        hatch = None if side == "k" else "////"
        bars.bar(xs, bits, width * 0.94, color=colour, label=label, hatch=hatch, edgecolor="#fff8")
    bars.set_xlabel("layer")
    bars.set_ylabel("bits per element")
    bars.set_ylim(0, 19)  # room for the legend above 16 bits
    bars.set_yticks([0, 4, 8, 12, 16])
    bars.legend(ncols=2, loc="upper right")
    _whole_ticks(bars.xaxis)
    if not others:
        return
    costs, series = others[0], dict[str, list[tuple[int, float]]]()
    for row in measured:
        name = _quantized_sides(row["k_format"], row["v_format"])
        series.setdefault(name, []).append((row["layer"], _positive(row["kl"])))
    for marker, (name, points) in zip(cycle("osD^vPX*<>h8"), series.items(), strict=False):
        costs.plot(*zip(*sorted(points), strict=True), marker=marker, linewidth=1, label=name)
    log_axis(costs)
    costs.set_xlabel("layer that alone is quantized")
    costs.set_ylabel("KL, nats per token")
    costs.grid(axis="y")
    _whole_ticks(costs.xaxis)
    costs.legend(fontsize=8)


def error_names(plan: CachePlan) -> list[str]:
    """The steps whose error the plan tells; the whole plan last, where it is not all int4."""
    known = [name for name in plan.facts["steps"] if f"k.error.{name}" in plan.tensors]
    chosen = {(side, name) for pair in plan.formats for side, name in zip("kv", pair, strict=True)}
    measured = {
        (side, name) for side, name in chosen if f"{side}.format_error.{name}" in plan.tensors
    }
    return [*known, "plan"] if {name for _, name in measured} - {"int4"} else known


def errors(plan: CachePlan, side: str, name: str) -> torch.Tensor:
    """[layers, KV heads]: the error after a step, NaN where a layer or its format has none."""
    if name != "plan":
        found = plan.tensors[f"{side}.error.{name}"].clone()
    else:
        shape = plan.num_layers, plan.num_kv_heads
        found = torch.full(shape, torch.nan, dtype=torch.float32, device="cpu")
        for layer, pair in enumerate(plan.formats):
            of_format = plan.tensors.get(f"{side}.format_error.{pair['kv'.index(side)]}")
            if of_format is not None:
                found[layer] = of_format[layer]
    for layer, entry in enumerate(plan.facts["layers"]):
        if entry["kept"] is not None:
            found[layer] = torch.nan
    return found


def _error(figures: Mapping[str, Any]) -> float:
    return figures.get("kl_error") or 0.0


def _positive(kl: float) -> float:
    return max(kl, 1e-7)  # on a log scale; rounding may give 0 or less


def _in_deviations(size: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """[layers * KV heads, channels]: over the median channel deviation of the head."""
    typical = std.median(-1, keepdim=True).values.clamp(min=1e-30)
    return (size / typical).flatten(0, 1)


def _log_scale(maps: Sequence[torch.Tensor]) -> Any:
    from matplotlib.colors import LogNorm

    values = torch.cat([x.flatten() for x in maps])
    values = values[values.isfinite() & (values > 0)]
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.1, 1.0)
    return LogNorm(low, max(high, low * 1.01), clip=True)


def _heat(axes: Any, values: torch.Tensor, scale: Any) -> Any:
    """Draw [rows, columns]; NaN is grey."""
    from matplotlib import colormaps

    colours = colormaps["viridis"].with_extremes(bad="#80808060")
    for spine in axes.spines.values():
        spine.set_visible(False)
    return axes.imshow(
        values.numpy(), cmap=colours, norm=scale, aspect="auto", interpolation="nearest"
    )


def _colour_bar(page: Any, image: Any, panels: Any, label: str) -> None:
    bar = page.colorbar(image, ax=panels, label=label, aspect=30, pad=0.01)
    plain_ticks(bar.ax.yaxis, image.norm.vmin, image.norm.vmax)


def _quantized_sides(k_format: str, v_format: str) -> str:
    if v_format in EXACT_CODECS:
        return f"K {k_format}"
    return f"V {v_format}" if k_format in EXACT_CODECS else f"{k_format} / {v_format}"


def _whole_ticks(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))


def _layer_ticks(axes: Any, plan: CachePlan) -> None:
    """Name every layer, or every few, at its first KV head."""
    count, per_layer = plan.num_layers, plan.num_kv_heads
    named = range(0, count, -(-count // 12))
    axes.set_yticks([layer * per_layer for layer in named], [str(layer) for layer in named])
