"""Evaluations of several seeds put together: tables of accuracy, capacity and KL.

A file of results, recall.json or code.json, has "runs": what kvquant.evaluation.evaluate.evaluate
returned, each with "model", facts of the model, of which "name" is one. Runs of a model differ in
seeds, lengths, tasks or caches; what they have in common is put together:

    accuracy    right answers of a task at a length, of all seeds; the error is the root of the
                summed squares of the seeds', whose prompts are others
    a test      a task and length of which the model answers 95 % with its 16-bit cache
    capacity    the largest number of facts in a context (of a chain: steps) of which the cache
                answers 99 %. It also answers 99 % of every smaller number that was measured. Only
                numbers of which the 16-bit cache does the same count
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
        texts: of greedy and of sampled texts, by window, cache and way, what generation.summary
            found; of the last run.
    """

    name: str
    runs: Sequence[Run]

    def __post_init__(self) -> None:
        self.bits: dict[str, float] = {}
        # by seed, and by text: what was measured twice counts once
        found: dict[tuple[Window, str, str, int], dict[Any, Any]] = {}
        steps: dict[tuple[Window, str, int], dict[Any, Any]] = {}
        kl: dict[tuple[Window, str, int], dict[Any, Any]] = {}
        self.facts: dict[tuple[str, int], int] = {}
        self.texts: dict[tuple[Window, str, str], Mapping[str, Any]] = {}
        for run in self.runs:
            seed, text = run["settings"]["sizes"]["seed"], run["settings"]["text"]
            caches = [(_window(one), _plain_name(one)) for one in run["caches"][1:]]
            self.bits |= {_plain_name(one): one["packed_bits"] for one in run["caches"][1:]}
            for length, tasks in run.get("retrieval", {}).items():
                for task, one in tasks.items():
                    place = task, int(length)
                    self.facts[place] = min(one["facts"], self.facts.get(place, one["facts"]))
                    for cache, pair in zip(caches, one["caches"], strict=True):
                        found.setdefault((*cache, *place), {})[seed] = pair
                    if task != CHAINS:
                        continue
                    for lines, pairs in one.get("by_lines", {}).items():
                        for cache, pair in zip(caches, pairs, strict=True):
                            steps.setdefault((*cache, int(lines) - 1), {})[seed, length] = pair
            for length, rows in run.get("kl", {}).items():
                for cache, row in zip(caches, rows, strict=True):
                    kl.setdefault((*cache, int(length)), {})[text] = row
            for ways in run.get("generation", {}).values():
                for way in ("greedy", "sampled"):
                    for cache, row in zip(caches, ways[way], strict=True):
                        self.texts[(*cache, way)] = row
        self.cells = {key: together([*pairs.values()]) for key, pairs in found.items()}
        self.steps = {key: together([*pairs.values()]) for key, pairs in steps.items()}
        self.kl = {key: _mean_kl([*rows.values()]) for key, rows in kl.items()}

    @property
    def _known(self) -> set[tuple[Window, str]]:
        """Windows and caches."""
        known = {(key[0], key[1]) for key in self.cells} | {(key[0], key[1]) for key in self.kl}
        return known | {(key[0], key[1]) for key in self.texts}

    @property
    def windows(self) -> list[Window]:
        """Sinks and recent tokens of caches, smallest first."""
        return sorted({window for window, _ in self._known})

    def caches(self, window: Window) -> list[str]:
        """Names of the caches with this window, most bits first."""
        names = [name for each, name in self._known if each == window]
        return sorted(names, key=lambda name: (-self.bits[name], name))

    def exact(self) -> Table:
        """What the 16-bit cache answers of how many questions of each task, by the tokens of
        contexts."""
        places = {key[2:]: one for key, one in sorted(self.cells.items(), key=_by_answers)}
        lengths = sorted({length for _, length in places})
        rows = []
        for task in dict.fromkeys(task for task, _ in places):
            row = [task]
            for length in lengths:
                one = places.get((task, length))
                mark = "" if one is None or one.is_test else ", not a test"
                share = "-" if one is None else f"{100 * one.exact:.1f} % of {one.answers:,}"
                row.append(share + mark)
            rows.append(row)
        return ["16 bit", *(f"{one:,} tokens" for one in lengths)], rows

    def accuracy(self, window: Window) -> Table:
        """Points won or lost in each task, at the longest contexts where it is a test."""
        longest: dict[str, int] = {}
        for key, one in self.cells.items():
            if key[0] == window and one.is_test:
                longest[key[2]] = max(key[3], longest.get(key[2], 0))
        names = [n for n in self.caches(window) if self._tests(window, n)]
        rows = [["16 bit", "16.00"]]
        for task, length in longest.items():
            found = [self.cells.get((window, name, task, length)) for name in names]
            best = max(filter(None, found), key=lambda one: one.answers)
            rows[0].append(f"{100 * best.exact:.1f} %")
        for name in names:
            cells = (self.cells.get((window, name, *place)) for place in longest.items())
            rows.append(
                [name, f"{self.bits[name]:.2f}", *("-" if c is None else str(c) for c in cells)]
            )
        return ["cache", "bits", *(f"{task}, {length:,}" for task, length in longest.items())], rows

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

    def agreement(self, window: Window) -> Table:
        """Shares of texts that are those of the 16-bit cache, up to so many tokens."""
        found = {key[1:]: one for key, one in self.texts.items() if key[0] == window}
        counts = sorted({int(count) for one in found.values() for count in one["agreement"]})
        rows = []
        for name in self.caches(window):
            for way in ("greedy", "sampled"):
                if (name, way) in found:
                    shares = found[name, way]["agreement"]
                    cells = [f"{100 * shares[str(c)]['share']:.0f} %" for c in counts]
                    rows.append([name, f"{self.bits[name]:.2f}", way, *cells])
        return ["cache", "bits", "texts", *(f"{count:,} tokens" for count in counts)], rows

    def lost(self, window: Window) -> dict[str, tuple[float, float]]:
        """Points that each cache loses: the mean and the most.

        Both count the tasks and lengths that are a test for all caches with this window.
        """
        tests = {name: self._tests(window, name) for name in self.caches(window)}
        asked = [set(cells) for cells in tests.values() if cells]
        common = sorted(set.intersection(*asked)) if asked else []
        found = {}
        for name, cells in tests.items():
            points = [100 * (cells[at].exact - cells[at].given) for at in common if cells]
            if points:
                found[name] = sum(points) / len(points), max(points)
        return found

    def _tests(self, window: Window, name: str) -> dict[tuple[str, int], Cell]:
        """The answers of a cache by task and length, where the task is a test."""
        return {k[2:]: c for k, c in self.cells.items() if k[:2] == (window, name) and c.is_test}

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


def _by_answers(item: tuple[Any, Cell]) -> int:
    return item[1].answers


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
    """Of several texts; the tail is the mean of theirs."""
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


def as_run(model: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """What evaluate returned, as a run of a model with these facts; its config is left out, which
    has the path of the model's folder."""
    settings = {name: one for name, one in found["settings"].items() if name != "config"}
    return {"model": dict(model), **found, "settings": settings}


def text_of(facts: Mapping[str, Any], runs: Iterable[Run]) -> str:
    """A file of runs, each in one line."""
    head = json.dumps({**facts, "runs": []}, indent=1).removesuffix("]\n}")
    lines = ",\n".join(json.dumps(run) for run in runs)
    return f"{head}\n{lines}\n ]\n}}\n"


def tables(one: Evaluations) -> Iterator[tuple[str, Table]]:
    """A heading and a table: what 16 bit answers, then of each window what caches lose and keep."""
    if one.cells:
        yield f"Right answers with the 16-bit cache; {one.name}", one.exact()
    for window in one.windows:
        if all(one.bits[name] >= 16 for name in one.caches(window)):
            continue  # nothing was compared with the 16-bit cache
        sinks, recent = window
        tokens = f"the first {sinks} and the last {recent} tokens in 16 bit"
        where = tokens if sinks or recent else "no token of the prompt in 16 bit"
        for what, table in (
            (
                "Points won (+) or lost (-) ± the standard error, below the share of right answers "
                "with the 16-bit cache",
                one.accuracy(window),
            ),
            (
                "The largest number of facts (of chains: steps) of which a cache answers 99 %",
                one.capacity(window),
            ),
            ("KL to the 16-bit cache", one.divergence(window)),
            ("Texts that are equal to those of the 16-bit cache", one.agreement(window)),
        ):
            if len(table[0]) > 2 and table[1]:
                yield f"{what}; {one.name}, {where}", table
