"""What was measured on a GPU as tables, as plain data for JSON, and as a picture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import ConfigError, missing_extra
from ..io.atomic import replacing
from ..text import Column
from .cases import Case
from .gpu import Peer, Result, Times
from .timer import Machine

Point = tuple[int, float]
SDPA = "SDPA, 16 bit"  # its line in the picture


_COLUMNS = {  # of the tables of results, by what words() calls their cells
    "format": Column("format", left=True),
    **{name: Column(name) for name in ("batch", "heads", "T", "queries")},
    "drafted": Column("heads"),
    "lengths": Column("tokens", left=True),
    "kind": Column("attention", left=True),
    **{name: Column(name, part=1) for name in ("us", "GB/s", "peak", "error", "eager\nus")},
    "first": Column("to the\nfirst", part=1),
    "row us": Column("in a row\nus", part=1),
    "row GB/s": Column("GB/s", part=1),
    "row peak": Column("peak", part=1),
    "row first": Column("to the\nfirst", part=1),
    "evenly": Column("evenly\nus", part=1),
    "even": Column("ratio", part=1),
    "least": Column("bytes\nat peak", part=1),
    "torch": Column("torch", left=True, part=2),
    "torch us": Column("us", part=2),
    "torch ratio": Column("ratio", part=2),
    "torch row us": Column("in a row\nus", part=2),
    "torch row ratio": Column("ratio", part=2),
    "torch eager us": Column("torch,\neager us", part=3),
    "torch eager ratio": Column("ratio", part=3),
}
_SHAPE = "format", "batch", "heads", "T"
_FIRST = "us", "first", "row us", "row first", "error"
_TORCH = "torch", "torch us", "torch ratio", "torch row us", "torch row ratio"
_EVEN = "evenly", "even", "least", "error"
_TABLES: dict[str, tuple[str, ...]] = {  # by what was measured
    "decode": (
        *(*_SHAPE, "us", "GB/s", "peak", "row us", "row GB/s", "row peak", "error"),
        *_TORCH,
    ),
    "ragged": ("format", "heads", "lengths", "us", *_EVEN, *_TORCH[:3]),
    "wide": (*_SHAPE, *_FIRST, *_TORCH),
    "short": (
        *(*_SHAPE, "us", "row us", "eager\nus", "error"),
        *(*_TORCH, "torch eager us", "torch eager ratio"),
    ),
    "queries": (*_SHAPE, "queries", *_FIRST, *_TORCH),
    "variants": ("format", "heads", "kind", *_FIRST, *_TORCH),
    # names of latent formats leave no room for GB/s
    "mla": (
        "format",
        "batch",
        "drafted",
        "T",
        "us",
        "peak",
        "row us",
        "row peak",
        "error",
        *_TORCH,
    ),
}
COLUMNS = {table: tuple(_COLUMNS[name] for name in names) for table, names in _TABLES.items()}


def render_machine(machine: Machine) -> str:
    """The GPU, the versions and the limits in one line."""
    return (
        f"{machine.gpu}, {machine.driver}, torch {machine.torch}: peak bandwidth "
        f"{machine.read_gb_per_s:.0f} GB/s, empty graph {machine.empty_graph_us:.1f} us"
    )


def cells(table: str, results: Sequence[Result], machine: Machine) -> list[str]:
    """The last of the results as a row of one of the tables; it is compared with the first that has
    the same formats, and the same heads ("queries") or as many queries ("variants")."""

    def key(result: Result) -> tuple[object, ...]:
        case = result.case
        return case.name, table == "queries" and case.heads, table == "variants" and case.q_len

    last = results[-1]
    first = next(one for one in results if key(one) == key(last))
    found = _words(last, first.times, machine)
    return [found[name] for name in _TABLES[table]]


def _words(result: Result, first: Times, machine: Machine) -> dict[str, str]:
    """The cells of a result for all tables, by the names of _COLUMNS."""
    case, times, peer = result.case, result.times, result.sdpa
    even = result.even.alone if result.even is not None else None
    found = dict(zip(_SHAPE, _shape(case), strict=True)) | {
        "queries": str(case.q_len),
        "drafted": (f"{case.q_len} x " if case.q_len > 1 else "") + case.heads,
        "lengths": case.lengths,
        "kind": case.kind,
        "error": f"{result.error:.1e}",
        "least": f"{case.nbytes / machine.read_gb_per_s / 1e3:.1f}",
        "evenly": _number(even, ".1f"),
        "even": _ratio(times.alone, even),
        "torch": peer if isinstance(peer, str) else peer.name,
    }
    figures = time_figures(case, times, machine)
    for prefix, name in (("", "alone"), ("row ", "in_a_row"), ("eager ", "eager")):
        own = getattr(times, name)
        found[f"{prefix}first"] = _ratio(own, getattr(first, name))
        found |= {f"torch {prefix}us": "", f"torch {prefix}ratio": ""}
        if isinstance(peer, Peer):
            theirs = getattr(peer.times, name)
            found[f"torch {prefix}us"] = _number(theirs, ".1f")
            found[f"torch {prefix}ratio"] = _ratio(theirs, own)
    for prefix, name in (("", ""), ("row ", "in_a_row_")):
        found[f"{prefix}us"] = _number(figures[f"{name}us"], ".1f")
        found[f"{prefix}GB/s"] = _number(figures[f"{name}gb_per_s"], ".0f")
        found[f"{prefix}peak"] = _number(figures[f"{name}roof_percent"], ".0f", " %")
    return found | {"eager\nus": _number(times.eager, ".1f")}


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
    with replacing(path) as file:
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


def _ratio(slow: float | None, fast: float | None) -> str:
    return _number(slow and fast and slow / fast, ".2f", "x")


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
