"""The report of an evaluation: sections for the terminal and for the page of --report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvquant.report import page
from kvquant.report.page import Section, Table, Verdict, text
from kvquant.text import Column, count_text, number

from . import figures
from .check import ENOUGH as PASSAGES
from .check import verdict
from .figures import NO_TEST, POINTS, place_of
from .generation import BOTH, WAYS

NOT_ASKED = "not asked"  # because the model fails in 16 bit
ENOUGH = 3.0  # the limit must be so many times the standard error
MOST = 4  # reasons of a verdict that a page shows, beside the first
Caches = Sequence[Mapping[str, Any]]  # those of an evaluation, the 16-bit cache first
MARKS = {
    "met": ("good", "Within the limit."),
    "exceeded": ("bad", "Limit exceeded."),
    "unknown": ("notice", "Not known."),
}
CACHE = Column("cache", left=True)
# a task's title, its figure, and how to read the figure
TASKS = {
    "kl": (
        "Predictions",
        figures.divergence,
        "KL divergence of the next token's distribution from the one with a 16-bit cache. Filled "
        "marks: the mean, with its standard error. Hollow marks: 99.9 % of the tokens stay below. "
        "Further left is better.",
    ),
    "generation": (
        "Texts",
        figures.agreement,
        "How many texts are still those of the 16-bit cache, token by token. Greedy texts part at "
        "the first near-tie; sampled ones use the same random numbers for every cache. Bars: "
        "standard errors.",
    ),
    "retrieval": (
        "Finding facts among others",
        figures.accuracy,
        "Right answers against the length of the context. A cache that loses nothing lies on the "
        "dashed line, the 16-bit cache. Bars: standard errors of the difference to it. Where 16 "
        "bit answers too little, the model fails the task, and the figure shows no cache.",
    ),
}


def render(found: Mapping[str, Any]) -> str:
    """All tables, then a verdict on each cache and notes, for a terminal."""
    return text([*sections(found), *notes(found)])


def render_page(
    found: Mapping[str, Any], names: Mapping[str, str], limit: float | None = None
) -> str:
    """The HTML page; UnsupportedError if matplotlib or jinja2 is not installed.

    Args:
        found: of evaluate.
        names: of the inputs: "model", and "text" and "prompts" if they were files.
        limit: points of accuracy that a cache may lose, for a verdict.
    """
    page.check_libraries("this page")
    settings, name, judged = found["settings"], names["model"], None
    if limit is not None:
        result, reasons = against_limit(found, limit)
        met = f"No cache loses more than {limit:g} points of a task, beyond two standard errors."
        first, *others = reasons or [met]
        if len(others) > MOST:
            others = [*others[:MOST], f"{len(others) - MOST} more: see the tables."]
        judged = Verdict(*MARKS[result], first, others)
    of_text = names.get("text", f"given, hash {settings['text']}")
    of_text = "packaged, held_out.txt" if settings["text"] == "packaged" else of_text
    rows = [["setting", "value"], *map(list, {**names, "text": of_text}.items())]
    for part in ("sizes", "task", "reading"):
        rows += [[key, _words(value)] for key, value in settings[part].items()]
    return page.render(
        page.Page(
            f"kvquant evaluate: {name}",
            f"What {name} loses with quantized caches",
            f"{settings['model']} · {settings['dtype'].removeprefix('torch.')} · seed "
            f"{settings['sizes']['seed']} · text: {of_text}",
            judged,
            notes(found),
            [*sections(found, drawn=True), Section("Settings", tables=[Table("Settings", rows)])],
        )
    )


def sections(found: Mapping[str, Any], *, drawn: bool = False) -> Iterator[Section]:
    """What caches take, and a section for each task, with a figure if drawn.

    If the 16-bit cache fails a task, other caches' cells have NOT_ASKED, or NO_TEST if it asked
    them.
    """
    yield Section("What each cache takes", tables=[_costs(found["caches"])])
    tables: dict[str, Callable[[Caches, str, Any], Iterator[Table]]]
    tables = {"kl": _kl, "generation": _generation, "retrieval": _retrieval}
    for kind, (title, draw, how) in TASKS.items():
        tasks = found.get(kind, {}).items()
        shown = [one for each in tasks for one in tables[kind](found["caches"], *each)]
        if shown and drawn:
            yield Section(title, how, (), draw(found), shown)
        elif shown:
            yield Section(title, tables=shown)


def notes(found: Mapping[str, Any]) -> list[str]:
    """Verdicts, then layers that no cache holds, prompts within 16 bit, tasks failed in 16 bit."""
    return [*verdicts(found), *found.get("notes", []), *failures(found)]


def verdicts(found: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each quantized cache: its KL, the answers that it lost and won, and a verdict.

    A loss counts from two standard errors on. Else the sentence says how small a loss would not
    show.
    """
    for at, one in enumerate(found["caches"][1:]):
        told = []
        for length, rows in found.get("kl", {}).items():
            row = rows[at]
            word = verdict(row["kl"], row["kl_error"], row["passages"])
            if row["passages"] < PASSAGES:
                word = f"too few passages for a verdict, give {PASSAGES} --samples or more"
            told.append(f"KL {max(row['kl'], 0.0):.4f} {place_of(length)}: {word}")
        pairs = [pair for _, name, pair in _tested(found, (BOTH,)) if name == one["cache"]]
        if answers := sum(pair["answers"] for pair in pairs):
            drop = sum(pair["drop"] * pair["answers"] for pair in pairs) / answers
            error = math.hypot(*(pair["error"] * pair["answers"] for pair in pairs)) / answers
            lost, won = (sum(pair[name] for pair in pairs) for name in ("lost", "won"))
            unclear = f"no clear loss (one below {2 * POINTS * error:.1f} points would not show)"
            told.append(
                f"of {count_text(answers, 'answer')} {lost} lost and {won} won ("
                f"{0.0 - POINTS * drop:+.1f} ± {POINTS * error:.1f} points): "
                f"{'answers are lost' if drop > 2 * error else unclear}"
            )
        if told:
            yield f"{one['cache']}: {'; '.join(told)}."


def _costs(caches: Caches) -> Table:
    columns = CACHE, *map(Column, ("bits", "bytes\na token", "tokens\na GiB"))
    rows = [
        [
            one["cache"],
            f"{one['bits']:.2f}",
            f"{one['bytes_a_token']:,.0f}",
            f"{one['tokens_per_gib']:,}",
        ]
        for one in caches
    ]
    head = (
        "What a cache of the longest context takes. Sinks and recent: its first and last tokens, "
        "which stay in 16 bit and count in bits and bytes; in longer contexts they weigh less:"
    )
    return Table("Table: caches", [columns, *rows], head, is_open=True)


def _kl(caches: Caches, length: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[Table]:
    titles = "KL, nats\na token", "±", "first\nquarter", "last\nquarter"
    columns = CACHE, *map(Column, (*titles, "99.9 % of\ntokens below", "top-1 %", "±"))
    cells = [["16 bit", "0", "-", "0", "0", "0", "100.0", "-"]]
    cells += [
        [
            cache["cache"],
            f"{max(one['kl'], 0.0):.5f}",  # rounding may leave less than 0
            number(one["kl_error"], ".5f"),
            *(f"{max(one['by_position'][at], 0.0):.5f}" for at in (0, -1)),
            f"{one['kl_tail']:.4f}",
            f"{POINTS * one['top1']:.1f}",
            number(one["top1_error"], ".1%").rstrip("%"),
        ]
        for cache, one in zip(caches[1:], rows, strict=True)
    ]
    passages = _counted(rows[0], "passage")
    head = (
        f"Predictions of {rows[0]['tokens']:,} tokens in {passages}, "
        f"decoded after {int(length):,} tokens, compared with those of the 16-bit cache:"
    )
    yield Table(f"Table: {place_of(length)}", [columns, *cells], head)


def _retrieval(caches: Caches, length: str, tasks: Mapping[str, Any]) -> Iterator[Table]:
    window = max(one["recent_len"] for one in caches)
    least = min(one["least_distance"] for one in tasks.values())
    head = (
        f"Right answers in contexts of {int(length):,} tokens: in the first row in %, in the "
        "others the change in points ± its standard error. Below a task's name stands how many "
        f"facts its context has. No answer is among the tokens in 16 bit: each ends {least} "
        f"tokens or more before the end of its context, and {least - window} or more before "
        "the last tokens in 16 bit:"
    )
    named = [(f"{name}\n{one['facts']} facts", one) for name, one in tasks.items()]
    yield Table(f"Table: contexts of {int(length):,} tokens", _accuracy(caches, named), head)


def _generation(caches: Caches, length: str, task: Mapping[str, Any]) -> Iterator[Table]:
    for way in WAYS:
        rows = task[way]
        counts = list(rows[0]["agreement"])
        same = (Column(f"same after\n{count} tokens") for count in counts)
        columns = CACHE, Column("first differing\ntoken, median"), *same
        cells = [["16 bit", "-", *["100 %"] * len(counts)]]
        for cache, one in zip(caches[1:], rows, strict=True):
            parted = sorted(at for at in one["first_divergence"] if at is not None)
            # texts that never part count as the longest
            median = parted[one["prompts"] // 2] if len(parted) > one["prompts"] // 2 else None
            shares = [f"{POINTS * share['share']:.0f} %" for share in one["agreement"].values()]
            cells.append([cache["cache"], "never" if median is None else str(median), *shares])
        head = f"{way.capitalize()} texts {place_of(length)}, of {_counted(rows[0], 'prompt')}:"
        yield Table(f"Table: {way}, {place_of(length)}", [columns, *cells], head)
        answers = task.get(f"{way}_answers")
        if answers is not None:
            head = (
                f"Right answers in {way} texts {place_of(length)}, in %, and the change in points:"
            )
            accuracy = _accuracy(caches, [("right", answers)])
            yield Table(f"Table: answers, {way}, {place_of(length)}", accuracy, head)


def _accuracy(
    caches: Caches, tasks: Sequence[tuple[str, Mapping[str, Any]]]
) -> list[Sequence[str | Column]]:
    columns = [CACHE, *(Column(name, part=part) for part, (name, _) in enumerate(tasks, 1))]
    cells: list[Sequence[str | Column]] = [columns]
    cells.append(["16 bit", *(f"{POINTS * task['exact']:.1f}" for _, task in tasks)])
    for at, cache in enumerate(caches[1:]):
        cells.append([cache["cache"], *(_points(task, at) for _, task in tasks)])
    return cells


def _points(task: Mapping[str, Any], at: int) -> str:
    """What a cache changes, of the task's caches that at this place."""
    if task["fails"]:
        return NO_TEST if task["caches"] else NOT_ASKED
    one = task["caches"][at]
    return f"{0.0 - POINTS * one['drop']:+.1f} ± {POINTS * one['error']:.1f}"


def _counted(row: Mapping[str, Any], noun: str) -> str:
    """How many passages or prompts there were, and whether the text has fewer than asked for."""
    count, asked = row[f"{noun}s"], row.get("asked", 0)
    if count >= asked:
        return count_text(count, noun)
    errors = ", of which there is no standard error" if count < 2 else ""
    return (
        f"{count_text(count, noun)}{errors} ({asked} were asked for, and the text has room for no "
        "more: give a longer --text or a shorter --length)"
    )


def failures(found: Mapping[str, Any]) -> list[str]:
    """A sentence for each length at which the model fails tasks with its 16-bit cache."""
    groups = []
    for length, task in found.get("generation", {}).items():
        answers = [(f"{way} answers", task.get(f"{way}_answers")) for way in WAYS]
        groups.append((place_of(length), [(name, one) for name, one in answers if one]))
    for length, tasks in found.get("retrieval", {}).items():
        named = [(f"`{name}` among {one['facts']} facts", one) for name, one in tasks.items()]
        groups.append((f"in contexts of {int(length):,} tokens", named))
    sentences = []
    for where, tasks in groups:
        failed = [
            f"{name} ({POINTS * one['exact']:.0f} % right)" for name, one in tasks if one["fails"]
        ]
        asked = all(one["caches"] for _, one in tasks)
        if failed:
            sentences.append(
                f"With its 16-bit cache the model fails {', '.join(failed)} {where}: this is not a "
                f"test of the cache{'' if asked else ', so no other cache was asked'}."
            )
    return sentences


def against_limit(found: Mapping[str, Any], limit: float) -> tuple[str, list[str]]:
    """Compare the loss of accuracy of each cache and task with a limit in points.

    Returns:
        A word, and a sentence for each reason. "exceeded": a cache loses more than the limit and
        two standard errors. "unknown": a standard error is above a third of the limit, or the model
        fails all tasks in 16 bit. "met": neither.
    """
    pairs = [*_tested(found)]
    exceeded = [
        f"{name} loses {POINTS * one['drop']:.1f} ± {POINTS * one['error']:.1f} points of {task}: "
        f"more than {limit:g}"
        for task, name, one in pairs
        if POINTS * (one["drop"] - 2 * one["error"]) > limit
    ]
    if exceeded:
        return "exceeded", exceeded
    if not pairs:
        return "unknown", ["no task tests the caches: the model fails all of them in 16 bit"]
    wide = [
        f"not enough samples: {name} has a standard error of {POINTS * one['error']:.1f} points of "
        f"{task}, above a third of the limit; give more --samples, or more lines in --prompts"
        for task, name, one in pairs
        if POINTS * one["error"] > limit / ENOUGH
    ]
    return ("unknown", wide) if wide else ("met", [])


def _tested(
    found: Mapping[str, Any], ways: Sequence[str] = WAYS
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """The task, the cache and the paired answers of all tasks that test caches."""
    names = [one["cache"] for one in found["caches"]][1:]
    for length, tasks in found.get("retrieval", {}).items():
        for task, each in tasks.items():
            if not each["fails"]:
                for name, one in zip(names, each["caches"], strict=True):
                    yield f"{task}, {int(length):,} tokens", name, one
    for task in found.get("generation", {}).values():
        for way in ways:
            if (answers := task.get(f"{way}_answers")) and not answers["fails"]:
                for name, one in zip(names, answers["caches"], strict=True):
                    yield f"{way} answers", name, one


def _words(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_words, value))
    return "default" if value is None else f"{value:,}" if type(value) is int else str(value)
