"""What an evaluation found, as one HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from kvquant.html import page
from kvquant.html.page import Section, Table, Verdict

from . import figures
from .report import Shown, against_limit, failures, tables, verdicts

TASKS = (
    (
        "retrieval",
        "Finding facts among others",
        "Right answers against the length of the context. The dashed line is the 16-bit cache; a "
        "cache that loses nothing lies on it. Bars: standard errors of the difference to it. The "
        "number of facts may differ between lengths: the tables name it. Where 16 bit answers too "
        "little, the model fails the task: the figure shows no cache, which it would not test.",
        figures.accuracy,
    ),
    (
        "kl",
        "Predictions",
        "KL divergence of the next token's distribution from the one with a 16-bit cache, on "
        "held-out text. Filled marks: the mean, with its standard error. Hollow marks: the tail, "
        "which 99.9 % of the tokens stay below. Further left is better.",
        figures.divergence,
    ),
    (
        "generation",
        "Texts",
        "How many texts are still those of the 16-bit cache, token by token. A text that has "
        "parted once counts as different from there on. Greedy texts part at the first near-tie; "
        "sampled ones use the same random numbers for every cache. Bars: standard errors.",
        figures.agreement,
    ),
)
MOST = 4  # reasons of a verdict that are shown, beside the first
VERDICTS = {
    "met": ("good", "Within the limit."),
    "exceeded": ("bad", "Limit exceeded."),
    "unknown": ("notice", "Not known."),
}


def render(found: Mapping[str, Any], names: Mapping[str, str], limit: float | None = None) -> str:
    """Write the page.

    Args:
        found: what evaluate returned.
        names: of the inputs: "model", and "text" and "prompts" if they were files.
        limit: points of accuracy that a cache may lose, for a verdict.

    Returns:
        The HTML page.

    Raises:
        UnsupportedError: matplotlib or jinja2 is not installed.
    """
    page.check_libraries("this page")
    settings = found["settings"]
    verdict = None
    if limit is not None:
        result, reasons = against_limit(found, limit)
        met = f"No cache loses more than {limit:g} points of a task, beyond two standard errors."
        first, *others = reasons or [met]
        if len(others) > MOST:
            others = [*others[:MOST], f"{len(others) - MOST} more: see the tables."]
        verdict = Verdict(*VERDICTS[result], first, others)
    name = names["model"]
    return page.render(
        page.Page(
            f"kvquant evaluate: {name}",
            f"What {name} loses with quantized caches",
            f"{settings['model']} · {settings['dtype'].removeprefix('torch.')} · seed "
            f"{settings['sizes']['seed']} · text: {_text(settings, names)}",
            verdict,
            notes=[*verdicts(found), *found.get("notes", []), *failures(found)],
            sections=[*_tasks(found), _costs(found), _method(found, names)],
        )
    )


def _text(settings: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """Which held-out text it was: its file, else the hash of a text."""
    if settings["text"] == "packaged":
        return "packaged, held_out.txt"
    return names.get("text", f"given, hash {settings['text']}")


def _tasks(found: Mapping[str, Any]) -> Iterator[Section]:
    """A section for each task that was evaluated: words, a figure, its tables."""
    for kind, title, words, draw in TASKS:
        if found.get(kind):
            shown = [_table(one) for one in tables(found) if one.kind == kind]
            yield Section(title, words, drawn=draw(found), tables=shown)


def _table(one: Shown) -> Table:
    titles = [column.title.replace("\n", " ") for column in one.columns]
    head = one.head.rstrip(":")
    return Table(f"Table: {one.title}", [titles, *one.rows], f"{head}.")


def _costs(found: Mapping[str, Any]) -> Section:
    words = (
        "Bits of an element of K and V, with their headers and 16-bit tokens; bytes of a token in "
        "all layers."
    )
    table = next(_table(one) for one in tables(found) if one.kind == "costs")
    return Section("What each cache takes", words, tables=[replace(table, is_open=True)])


def _method(found: Mapping[str, Any], names: Mapping[str, str]) -> Section:
    settings = found["settings"]
    window = max(one["recent_len"] for one in found["caches"])
    words = (
        "Each prompt is read once with exact attention. Its 16-bit keys and values are quantized "
        "into each cache in turn, and every task decodes from there."
    )
    if settings["reading"]["from_rows"]:
        words = (
            f"Each cache reads the prompts itself, {settings['reading']['chunk']} tokens at a "
            "time: later chunks attend to packed rows."
        )
    inputs = {**names, "text": _text(settings, names)}
    rows = [["setting", "value"], *map(list, inputs.items())]
    for part in ("sizes", "task", "reading"):
        rows += [[name, _words(value)] for name, value in settings[part].items()]
    far = [
        [
            task,
            f"{int(length):,}",
            f"{one['least_distance']:,}",
            f"{one['least_distance'] - window:,}",
        ]
        for length, tasks in found.get("retrieval", {}).items()
        for task, one in tasks.items()
    ]
    titles = ["task", "tokens of context", "from the end", "beyond the window"]
    distances = Table(
        "How far back the answers stand",
        [titles, *far],
        "The least number of tokens between an answer and the end of its context, and between it "
        f"and the last {window} tokens, the most that one of the caches keeps in 16 bit.",
    )
    return Section(
        "How it was measured",
        words,
        tables=[
            *([distances] if far else []),
            _seconds(found),
            Table("Settings", rows, "Settings"),
        ],
    )


def _seconds(found: Mapping[str, Any]) -> Table:
    tasks = found["seconds"]
    rows = [["cache", *tasks]]
    for at, one in enumerate(found["caches"]):
        rows.append([one["cache"], *(f"{seconds[at]:.1f}" for seconds in tasks.values())])
    caption = "Seconds of each task. Those of the 16-bit cache include reading the prompts."
    return Table("Time", rows, caption)


def _words(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_words, value))
    return "default" if value is None else f"{value:,}" if type(value) is int else str(value)
