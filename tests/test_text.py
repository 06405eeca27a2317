"""Tables: they fit, they are plain text, and nothing of a cell is lost. Progress on stderr."""

from __future__ import annotations

import errno
import io
import os
import sys
from types import SimpleNamespace

import pytest

from kvquant import text
from kvquant.text import Column, progress, render_table, size_text, terminal_width

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


def test_no_part_of_a_number_with_its_error_is_lost() -> None:
    columns = [Column("name", left=True), *(Column(f"task {at}", part=at) for at in range(1, 9))]
    for parts in (columns, [Column(one.title, one.left) for one in columns]):
        text = render_table(parts, [["int8 and more", *["+0.0 ± 11.2"] * 8]], 40)
        assert text.count("+0.0 ± 11.2") == 8 and "int8 and" in text and "task 8" in text


def test_cells_are_text_and_no_markup() -> None:
    cell = "[red]x[/red] [bold :smile: 漢字 [/]"
    text = render_table(COLUMNS[:2], [[cell, "1"]], 80)
    assert cell in text and "\x1b" not in text
    assert render_table(COLUMNS[:2], [], 80).splitlines()[0].split() == ["name", "x"]


def test_bytes_are_told_in_the_unit_that_suits_them() -> None:
    sizes = (1023, 1024, 1536 << 20, 5 << 40)
    assert list(map(size_text, sizes)) == ["1023 bytes", "1 KiB", "1.5 GiB", "5 TiB"]


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


def test_progress_is_a_line_now_and_then_without_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress(200, "Reading") as update:
        for _ in range(190):
            update(1)
        update(10, "the end")
    shares = [f"Reading: {share} %" for share in range(10, 100, 10)]
    assert capsys.readouterr().err.splitlines() == [*shares, "Reading: the end, 100 %"]
    with progress(3, "Demo") as update:
        for stage in ("loading", "[red]reading", "timing"):
            update(1, stage)
    assert capsys.readouterr().err.splitlines() == [
        "Demo: loading, 33 %",
        "Demo: [red]reading, 66 %",
        "Demo: timing, 100 %",
    ]


def test_progress_ends_at_the_end_and_a_full_log_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress(525, "Reading") as update:
        update(512)
        update(13)
        update(0)
    assert capsys.readouterr().err.splitlines() == ["Reading: 97 %", "Reading: 100 %"]

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: False, write=full))
    with progress(2, "Reading") as update:
        update(1)


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with progress(4, "Reading") as update:
        update(1)
        update(3, "[red]stage[/red]")
    assert "Reading: [red]stage[/red]" in stream.getvalue() and "100%" in stream.getvalue()
    assert "\x1b[" in stream.getvalue()
    with progress(4, "Reading") as update, progress(2, "Compiling") as inner:
        inner(1)
        update(2)
    assert "Compiling" in stream.getvalue(), "below the other one"
    assert text._shown.get() is None


def test_lines_of_progress_may_go_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    with progress(40, "Compiling", line=lines.append) as update:
        for _ in range(10):
            update(4)
    assert lines == [f"Compiling: {share} %" for share in range(10, 101, 10)]
    assert capsys.readouterr().err == ""
