"""What an evaluation found, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvquant.text import Column, count_text, paragraph, render_table

ENOUGH = 3.0  # a standard error is at most the limit over this
POINTS = 100.0  # of a share


def render(found: Mapping[str, Any]) -> str:
    """Tables of all tasks; the 16-bit cache is the first row."""
    names = [one["cache"] for one in found["caches"]]
    parts = [_costs(found["caches"]), *map(paragraph, found.get("notes", []))]
    for length, rows in found.get("kl", {}).items():
        parts.append(_kl(length, names, rows))
    for length, task in found.get("generation", {}).items():
        parts += _generation(length, names, task)
    for length, tasks in found.get("retrieval", {}).items():
        parts.append(_retrieval(length, names, tasks))
    return "\n\n".join([*filter(None, parts), *map(paragraph, failures(found))])


def _costs(caches: Sequence[Mapping[str, Any]]) -> str:
    columns = (
        Column("cache", left=True),
        *map(Column, ("bits", "bytes\na token", "tokens\na GiB")),
    )
    rows = [
        [
            one["cache"],
            f"{one['bits']:.2f}",
            f"{one['bytes_a_token']:,.0f}",
            f"{one['tokens_per_gib']:,}",
        ]
        for one in caches
    ]
    return render_table(columns, rows)


def _kl(length: str, names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    columns = (
        Column("cache", left=True),
        *map(Column, ("KL, nats\na token", "±", "99.9 % of\ntokens below", "top-1 %", "±")),
    )
    cells = [["16 bit", "0", "-", "0", "100.0", "-"]]
    cells += [
        [
            name,
            f"{max(one['kl'], 0.0):.5f}",  # rounding may leave less than 0
            _or_dash(one["kl_error"], "{:.5f}"),
            f"{one['kl_tail']:.4f}",
            f"{POINTS * one['top1']:.1f}",
            _or_dash(one["top1_error"], "{:.1%}").rstrip("%"),
        ]
        for name, one in zip(names[1:], rows, strict=True)
    ]
    passages = _counted(rows[0], "passage")
    head = (
        f"Predictions of {rows[0]['tokens']:,} tokens in {passages}, "
        f"decoded behind {int(length):,} tokens, compared with those of the 16-bit cache:"
    )
    return f"{paragraph(head)}\n{render_table(columns, cells)}"


def _generation(length: str, names: Sequence[str], task: Mapping[str, Any]) -> Iterator[str]:
    behind = f"behind {int(length):,} tokens" if length != "0" else "behind the prompts"
    for way in ("greedy", "sampled"):
        rows = task[way]
        counts = list(rows[0]["agreement"])
        columns = (
            Column("cache", left=True),
            Column("first differing\ntoken, median"),
            *(Column(f"same after\n{count} tokens") for count in counts),
            *([Column("tokens a step,\nprompt lookup")] if way == "greedy" else []),
        )
        cells = [["16 bit", "-", *["100 %"] * len(counts)]]
        for name, one in zip(names[1:], rows, strict=True):
            parted = sorted(at for at in one["first_divergence"] if at is not None)
            # texts that never part count as the longest
            median = parted[one["prompts"] // 2] if len(parted) > one["prompts"] // 2 else None
            shares = [f"{POINTS * share['share']:.0f} %" for share in one["agreement"].values()]
            cells.append([name, "never" if median is None else str(median), *shares])
        if way == "greedy":
            for row, accepted in zip(cells, task["accepted"], strict=True):
                row.append(f"{accepted:.2f}")
        head = f"{way.capitalize()} texts {behind}, of {_counted(rows[0], 'prompt')}:"
        yield f"{paragraph(head)}\n{render_table(columns, cells)}"
        if (answers := task.get(f"{way}_answers")) is not None:
            if not answers["fails"]:
                yield f"Their answers:\n{_accuracy(names, [('right', answers['caches'])])}"


def _retrieval(length: str, names: Sequence[str], tasks: Mapping[str, Any]) -> str:
    columns = [(name, one["caches"]) for name, one in tasks.items() if not one["fails"]]
    if not columns:
        return ""
    least = min(one["least_distance"] for one in tasks.values())
    head = (
        f"Right answers in contexts of {int(length):,} tokens, in %, and below the first row the "
        f"change in points ± its standard error. Answers stand at least {least} tokens before the "
        "end:"
    )
    return f"{paragraph(head)}\n{_accuracy(names, columns)}"


def _accuracy(
    names: Sequence[str], tasks: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]
) -> str:
    columns = (Column("cache", left=True), *(Column(name) for name, _ in tasks))
    cells = [["16 bit", *(f"{POINTS * pairs[0]['exact']:.1f}" for _, pairs in tasks)]]
    for at, name in enumerate(names[1:]):
        cells.append([name, *(_points(pairs[at]) for _, pairs in tasks)])
    return render_table(columns, cells)


def _points(one: Mapping[str, Any]) -> str:
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


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def failures(found: Mapping[str, Any]) -> list[str]:
    """A sentence for each task that the model fails with its 16-bit cache."""
    found_of_texts = [
        f"With its 16-bit cache the model gives {POINTS * one['exact']:.0f} % of the right answers "
        f"in {way} texts: this is not a test of the cache."
        for task in found.get("generation", {}).values()
        for way in ("greedy", "sampled")
        if (one := task.get(f"{way}_answers")) and one["fails"]
    ]
    return found_of_texts + [
        f"With its 16-bit cache the model answers {POINTS * one['exact']:.0f} % of `{name}` in "
        f"contexts of {int(length):,} tokens: this is not a test of the cache."
        for length, tasks in found.get("retrieval", {}).items()
        for name, one in tasks.items()
        if one["fails"]
    ]


def against_limit(found: Mapping[str, Any], limit: float) -> tuple[str, list[str]]:
    """Hold accuracies against a limit.

    Args:
        found: of evaluate.
        limit: points of accuracy that a cache may lose.

    Returns:
        "met", "exceeded" (a cache loses more, beyond two standard errors) or "unknown" (a standard
        error is above a third of the limit, or no task tests the cache), and a sentence for each
        reason.
    """
    names = [one["cache"] for one in found["caches"]][1:]
    pairs = [
        (f"{task}, {int(length):,} tokens", name, one)
        for length, tasks in found.get("retrieval", {}).items()
        for task, each in tasks.items()
        if not each["fails"]
        for name, one in zip(names, each["caches"], strict=True)
    ]
    pairs += [
        (f"{way} answers", name, one)
        for task in found.get("generation", {}).values()
        for way in ("greedy", "sampled")
        if (answers := task.get(f"{way}_answers")) and not answers["fails"]
        for name, one in zip(names, answers["caches"], strict=True)
    ]
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
