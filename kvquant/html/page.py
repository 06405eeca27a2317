"""One HTML page that needs no other files and no network: the verdict first, then its sections."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvquant.errors import missing_extra

from .figure import Drawn

# names may hold them: what no page may, and what turns the order of the text that follows
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
TEMPLATE = Path(__file__).with_name("page.html.jinja")


@dataclass(frozen=True)
class Table:
    """A table that a reader opens.

    Attributes:
        summary: what to click on.
        rows: of words; the first one is the head.
        caption: how to read it.
        is_open: whether it is open at first.
    """

    summary: str
    rows: Sequence[Sequence[str]]
    caption: str
    is_open: bool = False


@dataclass(frozen=True)
class Section:
    """A part of a page.

    Attributes:
        title: its heading.
        words: that tell how to read it.
        steps: what to do, and the command or line of Python that does it.
        drawn: a figure, of a function decorated with kvquant.html.figure.figure.
        tables: at the end.
    """

    title: str
    words: str = ""
    steps: Sequence[tuple[str, str]] = ()
    drawn: Drawn | None = None
    tables: Sequence[Table] = ()


@dataclass(frozen=True)
class Verdict:
    """What to think of it.

    Attributes:
        kind: "good", "notice" or "bad", which sets the colour.
        mark: the word for it, such as "Fit for use."
        sentence: why.
        further: more sentences.
    """

    kind: str
    mark: str
    sentence: str
    further: Sequence[str] = ()


@dataclass(frozen=True)
class Page:
    """What a page shows, in this order.

    Attributes:
        title: for the browser's tab.
        heading, sub: the first two lines.
        verdict: what to think of it, if that is known.
        tiles: numbers that stand out: value, what it is, a note.
        notes: warnings.
        sections: the rest.
    """

    title: str
    heading: str
    sub: str
    verdict: Verdict | None = None
    tiles: Sequence[tuple[str, str, str]] = ()
    notes: Sequence[str] = ()
    sections: Sequence[Section] = ()


def check_libraries(what: str) -> None:
    """Raise before the work begins whose page could not be written.

    Args:
        what: that writes a page, for the error.

    Raises:
        UnsupportedError: matplotlib or jinja2 is not installed.
    """
    try:
        import jinja2  # noqa: F401  # only whether they are there
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise missing_extra(f"{what} needs matplotlib and jinja2", "report", error) from error


def render(page: Page) -> str:
    """Write a page as HTML. Words are shown as they are: none of them is markup.

    Raises:
        ImportError: jinja2 is not installed: call check_libraries before.
    """
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    sections = [
        vars(one)
        | {"figures": [*zip(("wide", "narrow"), map(Markup, one.drawn or ()), strict=False)]}
        for one in page.sections
    ]
    text = template.render(vars(page) | {"sections": sections})
    text = CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)
    return text.encode("utf-8", "replace").decode()  # names may hold what no file can
