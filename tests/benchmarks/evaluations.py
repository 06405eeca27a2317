"""Evaluations of several seeds put together: tables of accuracy, capacity and KL, and a picture.

A file of results, recall.json or code.json, has "runs": what kvquant.evaluation.evaluate.evaluate
returned, each with "model", facts of the model, of which "name" is one. Runs of a model differ in
seeds, lengths, tasks or caches; what they have in common is put together:

    accuracy    right answers of a task at a length, of all seeds; the error is the root of the
                summed squares of the seeds', whose prompts are others
    a test      the model answers 95 % with its 16-bit cache, of this task and length
    capacity    the largest number of facts (pairs in the context), or of steps (of a chain), that
                is answered to 99 %, as are all smaller ones that were measured; up to where the
                16-bit cache does the same
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEST, KEPT = 0.95, 0.99
CHAINS = "variables"  # of which steps are counted, not lines
COUNTED = ("keys", "values", "overwritten", "phonebook", CHAINS)
GREY, OURS, THEIRS = "#808890", "#3b82c4", "#d9730d"  # readable on light and on dark pages
PEERS = ("KIVI", "TurboQuant", "OSCAR", "KVarN")
Run = Mapping[str, Any]
Window = tuple[int, int]  # first and last tokens in 16 bit
Table = tuple[list[str], list[list[str]]]  # titles, and rows of cells


@dataclass(frozen=True)
class Cell:
    """Answers of a cache and of the 16-bit one to the same questions.

    Attributes:
        exact, given: shares of right ones.
        error: the standard error of their difference.
        answers: how many.
    """

    exact: float
    given: float
    error: float
    answers: int

    @property
    def is_test(self) -> bool:
        """Whether the model can do this with its 16-bit cache."""
        return self.exact >= TEST

    def __str__(self) -> str:
        return f"{100 * (self.given - self.exact):+.1f} ± {100 * self.error:.1f}"


def together(pairs: Sequence[Mapping[str, Any]]) -> Cell:
    """One cell of what statistics.paired found for several seeds.

    Example:
        >>> one = {"exact": 1.0, "given": 0.9, "error": 0.03, "answers": 50}
        >>> together([one, one]).error  # doctest: +ELLIPSIS
        0.0212...
    """
    count = sum(one["answers"] for one in pairs)
    exact, given = (
        sum(one[k] * one["answers"] for one in pairs) / count for k in ("exact", "given")
    )
    error = math.sqrt(sum((one["error"] * one["answers"]) ** 2 for one in pairs)) / count
    return Cell(exact, given, error, count)


@dataclass
class Evaluations:
    """All runs of one model.

    Args:
        name: of the model.
        runs: of that model.

    Attributes:
        bits: of an element of the packed rows, by the name of the cache.
        cells: what was answered, by window, cache, task and length.
        steps: the same of chains by their steps, all lengths together.
        facts: in a context, by task and length.
        kl: "kl", "kl_error", "kl_tail", "top1" and "tokens" by window, cache and length.
    """

    name: str
    runs: Sequence[Run]

    def __post_init__(self) -> None:
        self.bits: dict[str, float] = {}
        found: dict[tuple[Window, str, str, int], list[Any]] = {}
        steps: dict[tuple[Window, str, int], list[Any]] = {}
        kl: dict[tuple[Window, str, int], list[Any]] = {}
        self.facts: dict[tuple[str, int], int] = {}
        for run in self.runs:
            caches = [(_window(one), _plain_name(one)) for one in run["caches"][1:]]
            self.bits |= {_plain_name(one): one["packed_bits"] for one in run["caches"][1:]}
            for length, tasks in run.get("retrieval", {}).items():
                for task, one in tasks.items():
                    place = task, int(length)
                    self.facts[place] = min(one["facts"], self.facts.get(place, one["facts"]))
                    for cache, pair in zip(caches, one["caches"], strict=True):
                        found.setdefault((*cache, *place), []).append(pair)
                    if task != CHAINS:
                        continue
                    for lines, pairs in one.get("by_lines", {}).items():
                        for cache, pair in zip(caches, pairs, strict=True):
                            steps.setdefault((*cache, int(lines) - 1), []).append(pair)
            for length, rows in run.get("kl", {}).items():
                for cache, row in zip(caches, rows, strict=True):
                    kl.setdefault((*cache, int(length)), []).append(row)
        self.cells = {key: together(pairs) for key, pairs in found.items()}
        self.steps = {key: together(pairs) for key, pairs in steps.items()}
        self.kl = {key: _mean_kl(rows) for key, rows in kl.items()}

    @property
    def windows(self) -> list[Window]:
        """Sinks and recent tokens of caches, smallest first."""
        return sorted({key[0] for key in [*self.cells, *self.kl]})

    def caches(self, window: Window) -> list[str]:
        """Names of the caches with this window, most bits first."""
        names = {key[1] for key in [*self.cells, *self.kl] if key[0] == window}
        return sorted(names, key=lambda name: (-self.bits[name], name))

    def accuracy(self, window: Window) -> Table:
        """Points lost in each task, at the longest contexts where it is a test."""
        places = self._places(window)
        titles = ["cache", "bits"] + [f"{task}, {length:,}" for task, length in places]
        exact = [self._exact(window, *place) for place in places]
        marks = ["" if one >= TEST else " (not a test)" for one in exact]
        first = [f"{100 * one:.1f} %{mark}" for one, mark in zip(exact, marks, strict=True)]
        rows = [["16 bit", "16.00", *first]]
        for name in self.caches(window):
            found = (self.cells.get((window, name, *place)) for place in places)
            cells = [str(one) if one is not None and one.is_test else "-" for one in found]
            if set(cells) != {"-"}:
                rows.append([name, f"{self.bits[name]:.2f}", *cells])
        return titles, rows

    def capacity(self, window: Window) -> Table:
        """The most facts, and steps, that each cache keeps."""
        names = [name for name in self.caches(window) if any(self._counts(window, name).values())]
        tasks = [task for task in COUNTED if any(self._counts(window, one)[task] for one in names)]
        titles = ["cache", "bits", *(f"steps of {CHAINS}" if t == CHAINS else t for t in tasks)]
        if not names:
            return titles, []
        rows = [["16 bit", "16.00", *(self._most(window, names, task) for task in tasks)]]
        for name in names:
            counts = self._counts(window, name)
            rows.append([name, f"{self.bits[name]:.2f}", *(_kept(counts[t]) for t in tasks)])
        return titles, rows

    def divergence(self, window: Window) -> Table:
        """KL of the predictions of a held-out text, at the longest contexts."""
        titles = ["cache", "bits", "tokens before", "KL, nats a token", "±", "99.9 %", "top-1 %"]
        rows = []
        for name in self.caches(window):
            lengths = [key[2] for key in self.kl if key[:2] == (window, name)]
            if lengths:
                one = self.kl[window, name, max(lengths)]
                error = "-" if one["kl_error"] is None else f"{one['kl_error']:.5f}"
                cells = [f"{max(lengths):,}", f"{one['kl']:.5f}", error, f"{one['kl_tail']:.4f}"]
                rows.append([name, f"{self.bits[name]:.2f}", *cells, f"{100 * one['top1']:.1f}"])
        return titles, rows

    def lost(self, window: Window) -> dict[str, float]:
        """Points that each cache loses, the mean of all tasks and lengths that are a test."""
        found = {}
        for name in self.caches(window):
            cells = [c for key, c in self.cells.items() if key[:2] == (window, name) and c.is_test]
            if cells:
                found[name] = 100 * sum(one.exact - one.given for one in cells) / len(cells)
        return found

    def _places(self, window: Window) -> list[tuple[str, int]]:
        """Each task at the longest contexts where it is a test; else at the shortest."""
        known = [key for key in self.cells if key[0] == window]
        places = []
        for task in dict.fromkeys(key[2] for key in [*known, *self.cells]):
            lengths = sorted({key[3] for key in self.cells if key[2] == task})
            tests = [one for one in lengths if self._exact(window, task, one) >= TEST]
            places.append((task, tests[-1] if tests else lengths[0]))
        return places

    def _exact(self, window: Window, task: str, length: int) -> float:
        """Of the 16-bit cache, by the questions that most caches got."""
        cells = [one for key, one in self.cells.items() if key[2:] == (task, length)]
        here = [
            one for key, one in self.cells.items() if key[0] == window and key[2:] == (task, length)
        ]
        return max(here or cells, key=lambda one: one.answers).exact

    def _counts(self, window: Window, name: str) -> dict[str, dict[int, Cell]]:
        """By task, what was answered of each number of facts, where the 16-bit cache keeps 99 %."""
        found: dict[str, dict[int, Cell]] = {}
        for task in COUNTED:
            if task == CHAINS:
                cells = {key[2]: c for key, c in self.steps.items() if key[:2] == (window, name)}
            else:
                cells = {
                    self.facts[task, key[3]]: c
                    for key, c in self.cells.items()
                    if key[:3] == (window, name, task)
                }
            found[task] = dict(_leading(cells, "exact"))
        return found

    def _most(self, window: Window, names: Sequence[str], task: str) -> str:
        counts = [max(cells) for name in names if (cells := self._counts(window, name)[task])]
        return str(max(counts, default=0) or "-")


def _leading(cells: Mapping[int, Cell], share: str) -> Iterator[tuple[int, Cell]]:
    """Those from the smallest on that are kept."""
    for count in sorted(cells):
        if getattr(cells[count], share) < KEPT:
            return
        yield count, cells[count]


def _kept(cells: Mapping[int, Cell]) -> str:
    """The largest count that is kept; below the smallest one of those that 16 bit keeps."""
    if not cells:
        return "-"
    counts = [count for count, _ in _leading(cells, "given")]
    return str(counts[-1]) if counts else f"< {min(cells)}"


def _window(cache: Mapping[str, Any]) -> Window:
    return cache["sink_len"], cache["recent_len"]


def _plain_name(cache: Mapping[str, Any]) -> str:
    """The name without its 16-bit tokens, which the window tells."""
    return str(cache["cache"]).partition(" + ")[0]


def _mean_kl(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of several seeds; the tail is their mean."""
    count = sum(one["tokens"] for one in rows)
    means = {
        name: sum(one[name] * one["tokens"] for one in rows) / count
        for name in ("kl", "kl_tail", "top1")
    }
    errors = [one["kl_error"] for one in rows]
    error = None
    if None not in errors:
        squares = ((e * one["tokens"]) ** 2 for e, one in zip(errors, rows, strict=True))
        error = math.sqrt(sum(squares)) / count
    return means | {"kl_error": error, "tokens": count}


def of_models(runs: Iterable[Run]) -> list[Evaluations]:
    """The runs of each model together."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run["model"]["name"], []).append(run)
    return [Evaluations(name, each) for name, each in found.items()]


def read_runs(path: Path) -> list[Run]:
    """The runs of a file; none where there is no file."""
    if not path.exists():
        return []
    runs: list[Run] = json.loads(path.read_text(encoding="utf-8"))["runs"]
    return runs


def tables(one: Evaluations) -> Iterator[tuple[str, Table]]:
    """A heading and a table, for each window and kind of table."""
    for window in one.windows:
        sinks, recent = window
        tokens = f"the first {sinks} and the last {recent} tokens in 16 bit"
        where = tokens if sinks or recent else "no token of the prompt in 16 bit"
        for what, table in (
            ("Points of right answers lost or won ± the standard error", one.accuracy(window)),
            ("Facts, and steps, that are answered to 99 %", one.capacity(window)),
            ("KL to the 16-bit cache", one.divergence(window)),
        ):
            if len(table[1]) > 1:
                yield f"{what}; {one.name}, {where}", table


def labels(models: Sequence[Evaluations], window: Window) -> list[str]:
    """What the picture names."""
    return [name for one in models for name in one.lost(window)]


def draw(models: Sequence[Evaluations], window: Window, path: Path) -> None:
    """Points lost against bits of an element, a panel for each model."""
    import matplotlib
    from matplotlib.figure import Figure

    style = {"svg.fonttype": "none", "svg.hashsalt": path.name, "font.size": 9}
    style |= dict.fromkeys(("text.color", "xtick.color", "ytick.color", "axes.labelcolor"), GREY)
    style["axes.edgecolor"] = GREY
    with matplotlib.rc_context(style):
        page = Figure(figsize=(9.4, 0.6 + 3.2 * len(models)), layout="constrained")
        panels = page.subplots(len(models), 1, squeeze=False)[:, 0]
        for panel, one in zip(panels, models, strict=True):
            for name, points in one.lost(window).items():
                colour = THEIRS if name.startswith(PEERS) else OURS
                place = one.bits[name], points
                panel.plot(*place, "o", color=colour)
                panel.annotate(
                    name, place, xytext=(4, 3), textcoords="offset points", color=colour, size=7
                )
            panel.set_title(one.name, loc="left")
            panel.set_xlabel("bits of an element, all parameters included")
            panel.set_ylabel("points lost")
            panel.spines[["top", "right"]].set_visible(False)
            panel.invert_yaxis()
        page.savefig(path, transparent=True, metadata={"Date": None})
