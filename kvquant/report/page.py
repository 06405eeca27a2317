"""Reports: sections of words, steps, figures and tables, as text or as one HTML page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvquant.errors import missing_extra
from kvquant.text import Column, paragraph, render_table

# characters that HTML forbids, or that reverse the text after them
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
TEMPLATE = Path(__file__).with_name("page.html.jinja")
LINE = 76  # a line to paste is broken beyond it: a terminal has 80 columns
BREAKS = (" -o ", " \\\n        -o "), (", k_format", ",\n        k_format")


@dataclass(frozen=True)
class Table:
    """A table; row 0 is the head. A page folds it under its summary unless is_open."""

    summary: str
    rows: Sequence[Sequence[str | Column]]
    caption: str = ""
    is_open: bool = False


@dataclass(frozen=True)
class Section:
    """A part of a report.

    Attributes:
        title: its heading on a page.
        words: sentences, shown first.
        steps: pairs of what to do, and the line to paste for it.
        drawn: SVG of a figure (kvquant.report.figure.figure), for pages only.
        tables: shown last.
    """

    title: str
    words: str = ""
    steps: Sequence[tuple[str, str]] = ()
    drawn: str = ""
    tables: Sequence[Table] = ()


@dataclass(frozen=True)
class Verdict:
    """A verdict (mark), its reason and more; kind is "good", "notice" or "bad", for its colour."""

    kind: str
    mark: str
    sentence: str
    further: Sequence[str] = ()


@dataclass(frozen=True)
class Page:
    """An HTML page; title is of the browser's tab, sub below the heading, notes are warnings."""

    title: str
    heading: str
    sub: str
    verdict: Verdict | None = None
    notes: Sequence[str] = ()
    sections: Sequence[Section] = ()


def text(parts: Iterable[Section | Verdict | str]) -> str:
    """A report for a terminal: no titles of sections and no figures."""
    return "\n\n".join(block for part in parts for block in _blocks(part))


def _blocks(part: Section | Verdict | str) -> list[str]:
    if isinstance(part, str):
        return [paragraph(part)]
    if isinstance(part, Verdict):
        return ["\n".join(map(paragraph, [f"{part.mark} {part.sentence}", *part.further]))]
    found = [paragraph(part.words)] if part.words else []
    for what, line in part.steps:
        for space, broken in BREAKS if len(line) > LINE else ():
            line = line.replace(space, broken)
        found.append(f"{what}:\n    {line}")
    for table in part.tables:
        head, *rows = table.rows
        columns = [
            title if isinstance(title, Column) else Column(title, left=not at)
            for at, title in enumerate(head)
        ]
        drawn = render_table(columns, [[*map(str, row)] for row in rows])
        found.append(f"{paragraph(table.caption)}\n{drawn}" if table.caption else drawn)
    return found


def check_libraries(what: str) -> None:
    """Raise UnsupportedError, naming the command, if matplotlib or jinja2 is missing."""
    try:
        import jinja2  # noqa: F401  # only whether they are there
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise missing_extra(f"{what} needs matplotlib and jinja2", "report", error) from error


def render(page: Page) -> str:
    """Write a page as HTML, with all words escaped. Call check_libraries before."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    sections = [vars(one) | {"drawn": Markup(one.drawn)} for one in page.sections]
    html = template.render(vars(page) | {"sections": sections})
    html = CONTROLS.sub("\N{REPLACEMENT CHARACTER}", html)
    return html.encode("utf-8", "replace").decode()  # names may hold what no file can
