"""What was measured on a GPU as tables, as plain data for JSON, and as a picture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import ConfigError, missing_extra
from ..io.atomic import writing
from ..text import Column
from .cases import Case
from .gpu import Peer, Result, Times
from .timer import Machine
from .tune import Ablation, Choice

Point = tuple[int, float]
SDPA = "SDPA, 16 bit"  # its line in the picture
SHAPE = (Column("format", left=True), *map(Column, ("batch", "heads", "T")))
SPEEDS = (
    *SHAPE,
    *(Column(title, part=1) for title in ("us", "GB/s", "peak")),
    *(Column(title, part=1) for title in ("in a row\nus", "GB/s", "peak", "error")),
    Column("best SDPA", left=True, part=2),
    *(Column(title, part=2) for title in ("us", "ratio", "in a row\nus", "ratio")),
)
RAGGED = (
    SHAPE[0],
    SHAPE[2],
    Column("tokens", left=True),
    *(Column(title, part=1) for title in ("us", "evenly\nus", "ratio", "bytes\nat peak", "error")),
    Column("torch, 16 bit", left=True, part=2),
    *(Column(title, part=2) for title in ("us", "ratio")),
)
WIDE = (
    *SHAPE,
    *(Column(title, part=1) for title in ("us", "to the\nfirst", "in a row\nus", "to the\nfirst")),
    Column("error", part=1),
    Column("best SDPA", left=True, part=2),
    *(Column(title, part=2) for title in ("us", "ratio", "in a row\nus", "ratio")),
)
QUERIES = (*SHAPE, Column("queries"), *WIDE[len(SHAPE) :])
VARIANTS = (
    SHAPE[0],
    SHAPE[2],
    Column("attention", left=True),
    *(Column(title, part=1) for title in ("us", "to\nplain", "in a row\nus", "to\nplain")),
    Column("error", part=1),
    Column("torch, 16 bit", left=True, part=2),
    *(Column(title, part=2) for title in ("us", "ratio", "in a row\nus", "ratio")),
)
MLA = (
    *SHAPE,
    *(Column(title, part=1) for title in ("us", "peak", "in a row\nus", "peak", "error")),
    Column("torch", left=True, part=2),
    *(Column(title, part=2) for title in ("us", "ratio", "in a row\nus", "ratio")),
)
SHORT = (
    *SHAPE,
    *(Column(title, part=1) for title in ("us", "in a row\nus", "eager\nus", "error")),
    Column("best SDPA", left=True, part=2),
    *(Column(title, part=2) for title in ("us", "ratio", "in a row\nus", "ratio")),
    *(Column(title, part=3) for title in ("best SDPA\neager us", "ratio")),
)
PLANS = (
    *SHAPE,
    *(Column(title, part=1) for title in ("plans", "by the\nformula", "us", "in a row\nus")),
    *(Column(title, part=2) for title in ("fastest", "us", "in a row\nus")),
    *(Column(title, part=2) for title in ("gain", "gain\nin a row")),
)
ABLATIONS = (
    *SHAPE,
    Column("kernel", left=True),
    *(Column(title, part=1) for title in ("us", "ratio")),
    *(Column(title, part=2) for title in ("in a row\nus", "ratio")),
)
COLUMNS = {  # of the tables, by what was measured
    "decode": SPEEDS,
    "ragged": RAGGED,
    "wide": WIDE,
    "short": SHORT,
    "queries": QUERIES,
    "variants": VARIANTS,
    "mla": MLA,
    "tune": PLANS,
    "ablate": ABLATIONS,
}


def render_machine(machine: Machine) -> str:
    """The GPU, the versions and the limits in one line."""
    return (
        f"{machine.gpu}, {machine.driver}, torch {machine.torch}: peak bandwidth "
        f"{machine.read_gb_per_s:.0f} GB/s, empty graph {machine.empty_graph_us:.1f} us"
    )


def cells(table: str, results: Sequence[Result], machine: Machine) -> list[str]:
    """The last of the results as a row of one of the tables of COLUMNS, plans and kernels apart."""
    result = results[-1]
    if table == "ragged":
        return ragged_cells(result, machine)
    if table == "wide":
        return wide_cells(result, results)
    if table == "queries":
        return queries_cells(result, results)
    if table == "variants":
        return variants_cells(result, results)
    if table == "mla":
        return mla_cells(result, machine)
    return short_cells(result) if table == "short" else speed_cells(result, machine)


def speed_cells(result: Result, machine: Machine) -> list[str]:
    """A row of the table of SPEEDS."""
    row = _shape(result.case)
    found = time_figures(result.case, result.times, machine)
    for prefix in ("", "in_a_row_"):
        row.append(_number(found[f"{prefix}us"], ".1f"))
        row.append(_number(found[f"{prefix}gb_per_s"], ".0f"))
        row.append(_number(found[f"{prefix}roof_percent"], ".0f", " %"))
    return [*row, f"{result.error:.1e}", *_sdpa_cells(result, ("alone", "in_a_row"))]


def ragged_cells(result: Result, machine: Machine) -> list[str]:
    """A row of the table of RAGGED: also against the same tokens spread evenly."""
    case, us = result.case, result.times.alone
    assert result.even is not None
    row = [case.name, case.heads, case.lengths, f"{us:.1f}", f"{result.even.alone:.1f}"]
    row += [f"{us / result.even.alone:.2f}x", f"{case.nbytes / machine.read_gb_per_s / 1e3:.1f}"]
    return [*row, f"{result.error:.1e}", *_sdpa_cells(result, ("alone",))]


def wide_cells(result: Result, results: Sequence[Result]) -> list[str]:
    """A row of the table of WIDE: also against the first of the results in the same formats."""
    first = next((one for one in results if one.case.name == result.case.name), result).times
    row = _shape(result.case)
    for name in ("alone", "in_a_row"):
        us, least = getattr(result.times, name), getattr(first, name)
        row += [_number(us, ".1f"), _number(us and least and us / least, ".2f", "x")]
    return [*row, f"{result.error:.1e}", *_sdpa_cells(result, ("alone", "in_a_row"))]


def queries_cells(result: Result, results: Sequence[Result]) -> list[str]:
    """A row of the table of QUERIES: as of WIDE, against the first with the same heads."""
    alike = [one for one in results if one.case.heads == result.case.heads]
    row = wide_cells(result, alike)
    shape = len(SHAPE)
    return [*row[:shape], str(result.case.q_len), *row[shape:]]


def variants_cells(result: Result, results: Sequence[Result]) -> list[str]:
    """A row of the table of VARIANTS: against the first, plain one with as many queries."""
    alike = [one for one in results if one.case.q_len == result.case.q_len]
    row = [result.case.name, result.case.heads, result.case.kind]
    return [*row, *wide_cells(result, alike)[len(SHAPE) :]]


def mla_cells(result: Result, machine: Machine) -> list[str]:
    """A row of the table of MLA: names of latent formats leave no room for GB/s; several queries
    stand before the heads."""
    row = zip(SPEEDS, speed_cells(result, machine), strict=True)
    found = [cell for column, cell in row if column.title != "GB/s"]
    if result.case.q_len > 1:
        found[2] = f"{result.case.q_len} x {found[2]}"
    return found


def short_cells(result: Result) -> list[str]:
    """A row of the table of SHORT: also from Python, without a graph."""
    times = result.times
    row = [*_shape(result.case), f"{times.alone:.1f}", _number(times.in_a_row, ".1f")]
    row += [_number(times.eager, ".1f"), f"{result.error:.1e}"]
    return [*row, *_sdpa_cells(result, ("alone", "in_a_row", "eager"))]


def _sdpa_cells(result: Result, names: Sequence[str]) -> list[str]:
    """Torch's fastest, and of each time it and its ratio to ours."""
    peer = result.sdpa
    if isinstance(peer, str):
        return [peer, *[""] * 2 * len(names)]
    row = [peer.name]
    for name in names:
        theirs, ours = getattr(peer.times, name), getattr(result.times, name)
        row += [_number(theirs, ".1f"), _number(theirs and ours and theirs / ours, ".2f", "x")]
    return row


def choice_cells(choice: Choice) -> list[str]:
    """A row of the table of PLANS."""
    row = [*_shape(choice.case), str(choice.measured)]
    for plan, times in (choice.formula, choice.fastest):
        row.append(f"{plan.splits[0]} x {plan.warps}w x {plan.stages}s")
        row += [_number(times.alone, ".1f"), _number(times.in_a_row, ".1f")]
    gains = _ratios(choice.formula[1], choice.fastest[1])
    return [*row, *(_number(gain, ".2f", "x") for gain in gains)]


def ablation_cells(ablation: Ablation, whole: Ablation) -> list[str]:
    """A row of the table of ABLATIONS; ratios are to the whole kernel under its plan."""
    plan, times = ablation.plan, ablation.times
    alone, in_a_row = _ratios(times, whole.times)
    row = [*_shape(ablation.case), ablation.name]
    if ablation is whole:
        row[-1] += f": {plan.splits[0]} x {plan.warps}w x {plan.stages}s"
    row += [_number(times.alone, ".1f"), _number(alone, ".2f", "x")]
    return [*row, _number(times.in_a_row, ".1f"), _number(in_a_row, ".2f", "x")]


def _shape(case: Case) -> list[str]:
    return [case.name, str(case.batch), case.heads, str(case.seq_len)]


def figures(result: Result, machine: Machine) -> dict[str, Any]:
    """A result as plain data."""
    peer = result.sdpa
    sdpa: dict[str, Any]
    if isinstance(peer, str):
        sdpa = {"none": peer}
    else:
        alone, in_a_row = _ratios(peer.times, result.times)
        sdpa = {
            "name": peer.name,
            "in_a_row_name": peer.in_a_row_name,
            **time_figures(result.case.exact, peer.times, machine),
            "ratio": alone,
            "in_a_row_ratio": in_a_row,
        }
    found = {
        **case_figures(result.case),
        "error": result.error,
        **time_figures(result.case, result.times, machine),
        "sdpa": sdpa,
    }
    if result.even is not None:
        found["even"] = time_figures(result.case.even, result.even, machine)
    return found


def choice_figures(choice: Choice, machine: Machine) -> dict[str, Any]:
    """A choice of a plan as plain data."""
    found = {**case_figures(choice.case), "measured": choice.measured}
    for name, (plan, times) in (("formula", choice.formula), ("fastest", choice.fastest)):
        found[name] = asdict(plan) | time_figures(choice.case, times, machine)
    return found


def ablation_figures(ablation: Ablation, machine: Machine) -> dict[str, Any]:
    """An ablation of the kernel as plain data."""
    case = ablation.case
    found = {**case_figures(case), "kernel": ablation.name, **asdict(ablation.plan)}
    return found | time_figures(case, ablation.times, machine)


def case_figures(case: Case) -> dict[str, Any]:
    """A case as plain data."""
    words = {
        "k_format": str(case.k_format),
        "v_format": str(case.v_format),
        "dtype": str(case.dtype).removeprefix("torch."),
    }
    return asdict(case) | words | {"head_dim": case.head_dim, "nbytes": case.nbytes}


def time_figures(case: Case, times: Times, machine: Machine) -> dict[str, float | None]:
    """Microseconds, alone, in a row and from Python; GB/s of rows, percent of peak bandwidth."""
    found: dict[str, float | None] = {"eager_us": times.eager}
    for prefix, us in (("", times.alone), ("in_a_row_", times.in_a_row)):
        speed = None if us is None else case.nbytes / us / 1e3
        found[f"{prefix}us"] = us
        found[f"{prefix}gb_per_s"] = speed
        found[f"{prefix}roof_percent"] = speed and 100 * speed / machine.read_gb_per_s
    return found


def check_plot(path: Path) -> None:
    """Raise if a picture cannot be drawn to this file.

    Raises:
        ConfigError: the name does not end in .png.
        UnsupportedError: matplotlib is not installed.
    """
    if path.suffix != ".png":
        raise ConfigError(f"{path}: a picture is a PNG file, name it NAME.png")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise missing_extra("--plot needs matplotlib", "report", error) from error


def plot(results: Sequence[Result], machine: Machine, path: Path) -> None:
    """Draw percent of the peak bandwidth, in a row, over batch and over T: a line for each format.

    Torch's attention stands beside with its own bytes, those of the 16-bit cache.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, axis in zip(panels, ("batch", "seq_len"), strict=True):
        title, lines = series(results, machine, axis)
        for label, points in lines.items():
            style = {"color": "gray", "linestyle": "--"} if label == SDPA else {}
            axes.plot(*zip(*points, strict=True), marker="o", label=label, **style)
        axes.set_xscale("log", base=2)
        ticks = sorted({x for points in lines.values() for x, _ in points})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_title(title)
        axes.set_xlabel("batch" if axis == "batch" else "T (tokens)")
        axes.set_ylim(0, 105)
        axes.grid(alpha=0.3)
        if lines:
            axes.legend()
    panels[0].set_ylabel("percent of peak bandwidth, calls in a row")
    figure.suptitle(f"kvquant {machine.kvquant}, {machine.gpu}, {machine.read_gb_per_s:.0f} GB/s")
    with writing(path) as place, place.replaced() as file:
        figure.savefig(file, format="png", dpi=150)


def series(
    results: Sequence[Result], machine: Machine, axis: str
) -> tuple[str, dict[str, list[Point]]]:
    """Pick the results that show most of an axis, and make a line of each format.

    Args:
        results: in any order.
        machine: its peak bandwidth is 100 percent.
        axis: "batch" or "seq_len"; what else belongs to the shape is the same in all results
            picked.

    Returns:
        What is the same, and the points (batch or tokens, percent) by format, rising.
    """

    def fixed(case: Case) -> tuple[int, ...]:
        other = case.seq_len if axis == "batch" else case.batch
        return other, case.num_q_heads, case.num_kv_heads, case.head_dim

    groups: dict[tuple[int, ...], list[Result]] = defaultdict(list)
    for result in results:
        groups[fixed(result.case)].append(result)

    def breadth(key: tuple[int, ...]) -> tuple[int, int]:
        return len({getattr(result.case, axis) for result in groups[key]}), key[0]

    other, q, kv, _ = chosen = max(groups, key=breadth)
    lines: dict[str, dict[int, float | None]] = defaultdict(dict)
    for result in groups[chosen]:
        case, peer, x = result.case, result.sdpa, getattr(result.case, axis)
        lines[case.name][x] = _percent(case, result.times, machine)
        if isinstance(peer, Peer):
            lines[SDPA][x] = _percent(case.exact, peer.times, machine)
    title = f"{q}:{kv} heads, " + (f"T {other}" if axis == "batch" else f"batch {other}")
    points = {
        label: sorted((x, y) for x, y in line.items() if y is not None)
        for label, line in lines.items()
    }
    return title, {label: line for label, line in points.items() if line}


def _percent(case: Case, times: Times, machine: Machine) -> float | None:
    return time_figures(case, times, machine)["in_a_row_roof_percent"]


def _ratios(slow: Times, fast: Times) -> tuple[float, float | None]:
    alone = slow.alone / fast.alone
    if slow.in_a_row is None or fast.in_a_row is None:
        return alone, None
    return alone, slow.in_a_row / fast.in_a_row


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
