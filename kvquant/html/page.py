"""One HTML page that needs no other files and no network: the verdict first, then its sections."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvquant.errors import missing_extra

from .figure import Drawn

# names may hold characters that HTML forbids, or that turn the order of the text behind them
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
TEMPLATE = Path(__file__).with_name("page.html.jinja")


@dataclass(frozen=True)
class Table:
    """A table that the reader can open.

    Attributes:
        summary: the words to click on.
        rows: cells of text; the first row is the head.
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
        words: sentences that tell how to read it.
        steps: pairs of what to do and the command or line of Python that does it.
        drawn: a figure, made by a function with the decorator kvquant.html.figure.figure.
        tables: shown at the end.
    """

    title: str
    words: str = ""
    steps: Sequence[tuple[str, str]] = ()
    drawn: Drawn | None = None
    tables: Sequence[Table] = ()


@dataclass(frozen=True)
class Verdict:
    """The verdict on what a page shows.

    Attributes:
        kind: "good", "notice" or "bad", which sets the colour.
        mark: the verdict in a few words, such as "Fit for use."
        sentence: the reason.
        further: more reasons.
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
        verdict: None if the page has none.
        tiles: figures in large type: value, name, note.
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
    """Raise an error if a page cannot be written; call it before the work begins.

    Args:
        what: the command or object that writes the page, for the error.

    Raises:
        UnsupportedError: matplotlib or jinja2 is not installed.
    """
    try:
        import jinja2  # noqa: F401  # only whether they are there
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise missing_extra(f"{what} needs matplotlib and jinja2", "report", error) from error


def render(page: Page) -> str:
    """Write a page as HTML. The page shows all words as they are: none of them is markup.

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
