"""The figures of an evaluation's page. Each cache has one colour and one marker in all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

from kvquant.report.figure import BLUE, INK, ORANGE, figure, log_axis

from .generation import WAYS

POINTS = 100.0  # of accuracy: a share of 1
NO_TEST = "not a test"  # of the cache: the model fails in 16 bit

COLOURS = BLUE, ORANGE, "#2f9e62", "#9b6bd3", "#d1495b", "#1f9aa8", "#a8763e", "#d16ba5"
MARKERS = "osD^vPX"
COLUMNS = 4  # panels of tasks beside each other
LEAST_KL = 1e-7  # on a log axis; rounding may give 0 or less


def place_of(length: str) -> str:
    """After how many tokens a text was generated; 0 means prompts of your own."""
    return f"after {int(length):,} tokens" if length != "0" else "after the prompts"


def _rows(count: int, columns: int) -> int:
    return -(-count // columns)


def _axes(sheet: Any, count: int, columns: int, **options: Any) -> list[Any]:
    shape = _rows(count, columns), min(count, columns)
    grid = sheet.subplots(*shape, squeeze=False, **options).flatten()
    for axes in grid[count:]:
        axes.set_visible(False)
    return list(grid[:count])


def _looks(found: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Each quantized cache, and how its marks look."""
    names = [one["cache"] for one in found["caches"]][1:]
    looks = zip(names, cycle(COLOURS), cycle(MARKERS), strict=False)
    return [(name, {"color": colour, "marker": marker}) for name, colour, marker in looks]


def _legend(sheet: Any, axes: Sequence[Any]) -> None:
    """One legend below all panels: what each label means, once."""
    known: dict[str, Any] = {}
    for one in axes:
        handles, labels = one.get_legend_handles_labels()
        known |= dict(zip(labels, handles, strict=True))
    sheet.legend(known.values(), known.keys(), loc="outside lower center", ncols=3)


def _legend_height(found: Mapping[str, Any]) -> float:
    return 0.2 * _rows(len(found["caches"]), 3) + 0.15


def _tasks(found: Mapping[str, Any]) -> list[str]:
    return list(next(iter(found["retrieval"].values())))


@figure(lambda found: 2.1 * _rows(len(_tasks(found)), COLUMNS) + _legend_height(found))
def accuracy(sheet: Any, found: Mapping[str, Any]) -> None:
    """Right answers against the length of contexts: a panel for each retrieval task."""
    tasks, lengths = _tasks(found), sorted(found["retrieval"], key=int)
    panels = _axes(sheet, len(tasks), COLUMNS, sharex=True, sharey=True)
    looks, spread = _looks(found), 0.25 if len(lengths) > 1 else 0.6
    for place, (axes, task) in enumerate(zip(panels, tasks, strict=True)):
        cells = [found["retrieval"][length][task] for length in lengths]
        exact = [POINTS * cell["exact"] for cell in cells]
        xs = range(len(cells)) if len(cells) > 1 else (-0.5, 0.5)  # one length: a level line
        exact = exact if len(cells) > 1 else 2 * exact
        axes.plot(xs, exact, color=INK, linestyle="--", label="16 bit")
        failed = [x for x, cell in enumerate(cells) if cell["fails"]]
        for x in failed:
            axes.axvspan(x - 0.5, x + 0.5, color="#80808030", linewidth=0)
        if failed:
            middle = (failed[0] + failed[-1]) / 2
            axes.text(middle, 52, f"{NO_TEST}\nof the cache", ha="center", fontsize=8)
        for at, (name, look) in enumerate(looks):
            shift = spread * ((at + 0.5) / len(looks) - 0.5)  # else error bars cover one another
            shown = [(x, cell["caches"][at]) for x, cell in enumerate(cells) if not cell["fails"]]
            axes.errorbar(
                [x + shift for x, _ in shown],
                [POINTS * one["given"] for _, one in shown],
                yerr=[POINTS * one["error"] for _, one in shown],
                label=name,
                markersize=4,
                elinewidth=1,
                linewidth=1,
                **look,
            )
        axes.set_title(task)
        axes.set_xticks(range(len(lengths)), [f"{int(length):,}" for length in lengths])
        axes.set_xlim(-0.5, len(lengths) - 0.5)
        axes.set_ylim(0, 104)
        axes.grid(axis="y")
        if place % COLUMNS == 0:
            axes.set_ylabel("right answers, %")
        if place + COLUMNS >= len(tasks):
            axes.tick_params(labelbottom=True)
            axes.set_xlabel("tokens of context")
    _legend(sheet, panels)


@figure(lambda found: _rows(len(found["kl"]), 2) * (0.54 + 0.26 * len(found["caches"])) + 0.4)
def divergence(sheet: Any, found: Mapping[str, Any]) -> None:
    """Mean KL with its error, and the KL that 99.9 % of the tokens stay below."""
    lengths, looks = sorted(found["kl"], key=int), _looks(found)
    panels = _axes(sheet, len(lengths), 2, sharex=True, sharey=True)
    for place, (axes, length) in enumerate(zip(panels, lengths, strict=True)):
        for y, (one, (_, look)) in enumerate(zip(found["kl"][length], looks, strict=True)):
            mean, tail = (max(one[name], LEAST_KL) for name in ("kl", "kl_tail"))
            axes.plot([mean, tail], [y, y], color=look["color"], linewidth=1)
            error = one["kl_error"] or 0.0
            axes.errorbar(mean, y, xerr=[[min(error, 0.9 * mean)], [error]], capsize=3, **look)
            axes.plot(tail, y, markerfacecolor="none", **look)
        axes.set_yticks(range(len(looks)), [name for name, _ in looks])
        axes.set_ylim(len(looks) - 0.5, -0.5)
        log_axis(axes, "x")
        axes.set_title(place_of(length))
        axes.grid(axis="x")
        if place + 2 >= len(lengths):
            axes.tick_params(labelbottom=True)
            axes.set_xlabel("KL, nats a token")
    # what the marks of all caches mean
    panels[0].plot([], [], "o", color=INK, label="mean")
    panels[0].plot([], [], "o", color=INK, markerfacecolor="none", label="99.9 % are below")
    sheet.legend(loc="outside lower center", ncols=2)


@figure(lambda found: 2.6 * len(found["generation"]) + _legend_height(found))
def agreement(sheet: Any, found: Mapping[str, Any]) -> None:
    """The share of texts that are still the 16-bit cache's, token by token."""
    ways = [
        (length, way, task[way]) for length, task in found["generation"].items() for way in WAYS
    ]
    panels = _axes(sheet, len(ways), 2, sharey=True)
    for axes, (length, way, rows) in zip(panels, ways, strict=True):
        for one, (name, look) in zip(rows, _looks(found), strict=True):
            count, counts = one["prompts"], [int(number) for number in one["agreement"]]
            parted = sorted(at for at in one["first_divergence"] if at is not None)
            steps = [0, *parted, max(counts)]
            same = [count, *(count - at for at in range(1, len(parted) + 1)), count - len(parted)]
            colour = look["color"]
            shares = [POINTS * left / count for left in same]
            axes.plot(steps, shares, drawstyle="steps-post", color=colour, linewidth=1)
            given = one["agreement"].values()
            axes.errorbar(
                counts,
                [POINTS * share["share"] for share in given],
                yerr=[POINTS * (share["error"] or 0.0) for share in given],
                linestyle="",
                elinewidth=1,
                label=name,
                **look,
            )
        axes.set_title(f"{way}, {place_of(length)}")
        axes.set_xlabel("tokens of text")
        axes.set_ylim(0, 104)
        axes.grid(axis="y")
    for axes in panels[::2]:
        axes.set_ylabel("same as with 16 bit, %")
    _legend(sheet, panels)
