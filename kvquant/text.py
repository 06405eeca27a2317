"""Text for a terminal: tables that fit it or 80 columns, numbers and sizes, progress."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from io import StringIO

from rich.align import Align, AlignMethod
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

WIDTH = 80  # where no terminal tells its own
GAP = 2  # between columns
WORD = 12  # of words, before they are broken
SHARE = 10  # percent between two lines of progress
_shown: ContextVar[Progress | None] = ContextVar("shown", default=None)  # bars on the terminal


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: of one line or more.
        left: words, which begin at the left and may break; numbers end at the right.
        part: columns of one part stay together. The parts of a too wide table stand below each
            other, each with the columns of part 0.
    """

    title: str
    left: bool = False
    part: int = 0

    def __str__(self) -> str:
        return self.title.replace("\n", " ")


def terminal_width() -> int:
    """Columns to print in: the terminal's, or 80 where the output goes elsewhere."""
    if os.environ.get("COLUMNS") or (sys.stdout and sys.stdout.isatty()):
        return shutil.get_terminal_size((WIDTH, 24)).columns
    return WIDTH


def render_table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None = None
) -> str:
    """Lines of a table without colours, control sequences or trailing spaces.

    Args:
        columns: at least one of part 0.
        rows: a cell for each column.
        width: to fit in; the terminal's when None.
    """
    width = width or terminal_width()
    sizes = _sizes(columns, rows)
    tables = [
        _draw([columns[i] for i in chosen], [[row[i] for i in chosen] for row in rows], width)
        for chosen in _side_by_side(columns, sizes, width)
    ]
    return "\n\n".join(tables)


def paragraph(text: str, indent: str = "") -> str:
    """Words in lines that fit the terminal; all but the first begin with indent."""
    width = terminal_width()
    return textwrap.fill(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def spans(numbers: Iterable[int]) -> str:
    """Ascending numbers as "0, 3-5"."""
    found: list[list[int]] = []
    for n in numbers:
        if found and found[-1][1] == n - 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in found)


def count_text(n: int, noun: str) -> str:
    """A number of things: "1 page", "2 pages"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def size_text(num_bytes: float) -> str:
    """Bytes in the unit that suits them: "4.2 MiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


def number(value: float | None, form: str = ".3g", unit: str = "") -> str:
    """A number in a form, by default of three digits, with its unit; "-" for None."""
    return "-" if value is None else f"{value:{form}}{unit}"


def printable(text: str) -> str:
    """A text that cannot write to the terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _sizes(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[int]:
    """How wide each column is where no words are broken."""
    return [
        max(cell_len(line) for text in (column.title, *cells) for line in text.split("\n"))
        for column, *cells in zip(columns, *rows, strict=True)
    ]


def _side_by_side(columns: Sequence[Column], sizes: Sequence[int], width: int) -> list[list[int]]:
    """The columns of each of the tables that stand below each other: all in one where they fit."""
    parts: dict[int, list[int]] = {}
    for i, column in enumerate(columns):
        parts.setdefault(column.part, []).append(i)
    head = parts.pop(0)
    tables = [head]
    for part in parts.values():
        wider = [*tables[-1], *part]
        fits = sum(sizes[i] + GAP for i in wider) - GAP <= width
        if fits or tables == [head]:
            tables[-1] = wider
        else:
            tables.append([*head, *part])
    return tables


def _draw(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> str:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0))
    for column, size in zip(columns, _sizes(columns, rows), strict=True):
        side: AlignMethod = "left" if column.left else "right"
        table.add_column(
            Align(Text(column.title, justify=side), side, vertical="bottom"),
            justify=side,
            no_wrap=not column.left,
            overflow="fold",
            min_width=min(WORD, size) if column.left else size,
        )
    for row in rows:
        table.add_row(*map(Text, row))
    text = StringIO()
    console = Console(file=text, width=1000, color_system=None, legacy_windows=False)
    least = console.measure(table).minimum  # numbers are whole, be the terminal ever so narrow
    console.print(table, width=max(width, least), crop=False)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


@contextmanager
def progress(
    length: int, label: str, *, line: Callable[[str], object] | None = None
) -> Iterator[Callable[..., None]]:
    """Show how far a long run is: a bar where stderr is a terminal, else a line now and then.

    A run within another has a bar of its own below that one.

    Args:
        length: amounts that make the whole.
        label: what is done.
        line: takes these lines, for example the method of a logger; None prints them on stderr.

    Yields:
        update(amount, stage): so much more is done, of this stage.
    """
    if not (sys.stderr and sys.stderr.isatty()):
        yield _lines(length, label, line or _print)
        return
    outer = _shown.get()
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    own = Progress(*columns, console=Console(stderr=True)) if outer is None else nullcontext(outer)
    with own as bars:
        token, task = _shown.set(bars), bars.add_task(label, total=length)

        def update(amount: int, stage: str | None = None) -> None:
            bars.update(task, advance=amount, description=f"{label}: {stage}" if stage else label)

        try:
            yield update
        finally:
            _shown.reset(token)
            if outer is not None:
                outer.remove_task(task)


def _print(text: str) -> None:
    with suppress(OSError):  # what is done counts more than a full log
        print(text, file=sys.stderr)


def _lines(length: int, label: str, line: Callable[[str], object]) -> Callable[..., None]:
    """Give a line for every stage, and for every further share of the whole."""
    done, printed, last = 0, 0, None

    def update(amount: int, stage: str | None = None) -> None:
        nonlocal done, printed, last
        done += amount
        share = 100 * done // length
        if stage != last or share >= printed + SHARE or share == 100 > printed:
            printed, last = share, stage
            line(f"{label}: {f'{stage}, ' if stage else ''}{share} %")

    return update
