"""Tables: they fit, they are plain text, and nothing of a cell is lost."""

from __future__ import annotations

import os
import sys

import pytest

from kvquant.text import Column, render_table, terminal_width

COLUMNS = (
    Column("name", left=True),
    Column("x"),
    *(Column(title, part=1) for title in ("us", "in a row\nus")),
    Column("peer", left=True, part=2),
    Column("ratio", part=2),
)
ROWS = [
    ["a", "10.5", "1.0", "2.0", "folded, in 16 bit", "1.00x"],
    ["longer", "2", "30.0", "4.0", "", "2.00x"],
]


def test_columns_are_aligned_below_their_titles() -> None:
    assert render_table(COLUMNS, ROWS, 80).splitlines() == [
        "                    in a row",
        "name       x    us        us  peer               ratio",
        "──────────────────────────────────────────────────────",
        "a       10.5   1.0       2.0  folded, in 16 bit  1.00x",
        "longer     2  30.0       4.0                     2.00x",
    ]


def test_parts_of_a_wide_table_stand_below_each_other() -> None:
    first, second = render_table(COLUMNS, ROWS, 45).split("\n\n")
    assert [line.split() for line in first.splitlines()[-2:]] == [row[:4] for row in ROWS]
    assert [line.split("  ")[0] for line in second.splitlines()[-2:]] == ["a", "longer"]
    assert first.splitlines()[1].split() == ["name", "x", "us", "us"]
    assert second.splitlines()[0].split() == ["name", "x", "peer", "ratio"]
    assert max(map(len, [*first.splitlines(), *second.splitlines()])) <= 45


@pytest.mark.parametrize("width", [1, 20, 35])
def test_words_are_broken_and_numbers_are_not(width: int) -> None:
    text = render_table(COLUMNS, ROWS, width)
    for word in ("10.5", "30.0", "1.00x", "2.00x", "folded", "bit", "longer"):
        assert word in text
    if width == 35:
        assert max(map(len, text.splitlines())) <= 35


def test_cells_are_text_and_no_markup() -> None:
    cell = "[red]x[/red] [bold :smile: 漢字 [/]"
    text = render_table(COLUMNS[:2], [[cell, "1"]], 80)
    assert cell in text and "\x1b" not in text
    assert render_table(COLUMNS[:2], [], 80).splitlines()[0].split() == ["name", "x"]


def test_the_width_is_the_terminals_or_80(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert terminal_width() == 80
    monkeypatch.setenv("COLUMNS", "53")
    assert terminal_width() == 53
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((132, 50)))
    monkeypatch.setattr(sys.__stdout__, "fileno", lambda: 1)
    assert terminal_width() == 132
