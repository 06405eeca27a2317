"""What kvquant bench prints, writes and draws of a GPU."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvquant.bench.cases import Case, parse_formats
from kvquant.bench.gpu import Peer, Result, Times
from kvquant.bench.report import COLUMNS, cells, check_plot, figures, plot, series
from kvquant.bench.timer import Machine
from kvquant.errors import ConfigError, UnsupportedError
from kvquant.text import render_table

MACHINE = Machine("GPU", "CUDA 13.0", "2.11", "0.1", "2026-11-21", 132, 60 << 20, 4000.0, 4.7)


def result(name: str, batch: int, seq_len: int, us: float, sdpa_us: float | None = None) -> Result:
    """As if measured, with 32:8 heads; in a row calls take 80 % of the time."""
    case = Case(*parse_formats(name, 128), batch, 32, 8, seq_len)
    peer: Peer | str = "17.2 GB do not fit"
    if sdpa_us is not None:
        peer = Peer("flash, folded", "cudnn, folded", Times(sdpa_us, 0.8 * sdpa_us))
    return Result(case, 1.7e-3, Times(us, 0.8 * us), peer)


def shown(table: str, *results: Result) -> dict[str, str]:
    """The row of the last result by its titles; of titles that come twice the first cell."""
    row = zip(COLUMNS[table], cells(table, results, MACHINE), strict=True)
    return {column.title: cell for column, cell in reversed([*row])}


def test_what_has_no_time_in_a_row_says_so() -> None:
    whole = result("int4-g4", 1, 128, 9.0, 10.0)
    assert isinstance(whole.sdpa, Peer)
    peer = Peer("math, folded", "math, folded", Times(10.0, None))
    found = Result(whole.case, 1e-3, Times(9.0, None), peer)
    assert cells("decode", [found], MACHINE)[7:10] == ["-", "-", "-"]
    assert figures(found, MACHINE)["in_a_row_roof_percent"] is None
    assert figures(found, MACHINE)["sdpa"]["in_a_row_ratio"] is None
    assert series([found], MACHINE, "batch")[1] == {}


@pytest.mark.parametrize("sdpa_us", [330.0, None], ids=["sdpa", "no sdpa"])
def test_a_row_has_a_cell_for_each_column(sdpa_us: float | None) -> None:
    given = result("int4-g4", 64, 8192, 165.0, sdpa_us)
    row = ["int4-g4", "64", "32:8", "8192", "165.0", "4067", "102 %", "132.0"]
    found = cells("decode", [given], MACHINE)
    assert found[:8] == row and found[10] == "1.7e-03"
    torch = shown("decode", given)["torch"]
    assert torch == ("17.2 GB do not fit" if sdpa_us is None else "flash, folded")
    assert found[12:] == ([""] * 4 if sdpa_us is None else ["330.0", "2.00x", "264.0", "2.00x"])


def test_rows_are_compared_with_the_first_of_their_kind() -> None:
    """Of the same formats; of the same heads, or as many queries, where a table varies the rest."""
    plain = result("int4-g4", 64, 8192, 10.0)

    def other(us: float, **changes: object) -> Result:
        case = replace(plain.case, **changes)  # type: ignore[arg-type]
        return replace(plain, case=case, times=Times(us, 2 * us))

    wide = result("fp8", 64, 8192, 5.0), plain, other(12.0, num_q_heads=64)
    assert shown("wide", *wide)["to the\nfirst"] == "1.20x"
    assert cells("wide", wide, MACHINE)[4:8] == ["12.0", "1.20x", "24.0", "3.00x"]
    queries = plain, other(10.0, num_kv_heads=1), other(12.0, num_kv_heads=1, q_len=2)
    row = ["int4-g4", "64", "32:1", "8192", "2", "12.0", "1.20x"]
    assert cells("queries", queries, MACHINE)[:7] == row
    masked = other(10.0, q_len=4), other(12.0, q_len=4, variant="tree_mask")
    for results, words in (
        ((plain, other(8.0, variant="window")), ["window 4096", "8.0", "0.80x"]),
        ((plain, masked[0]), ["plain, 4 queries", "10.0", "1.00x"]),
        ((plain, *masked), ["tree mask, 4 queries", "12.0", "1.20x"]),
    ):
        assert cells("variants", results, MACHINE)[2:5] == words
    drafted = shown("mla", other(12.0, q_len=2))
    assert drafted["heads"] == "2 x 32:8" and "GB/s" not in drafted


@pytest.mark.parametrize("table", ["decode", "variants", "mla"])
def test_tables_of_usual_cases_fit_80_columns(table: str) -> None:
    usual = {"format": "int4-g4", "batch": "512", "heads": "32:8", "T": "32768", "us": "12345.6"}
    words = {"torch": "cudnn, enable_gqa", "peak": "93 %"}
    words |= {"in a row\nus": "12345.6", "GB/s": "4012", "error": "1.7e-03"}
    if table == "mla":
        words |= {"format": "int4-g8+fp8-g4", "torch": "bmm"}
    row = [(usual | words).get(column.title, "2.88x") for column in COLUMNS[table]]
    text = render_table(COLUMNS[table], [row], 80)
    assert max(map(len, text.splitlines())) <= 80
    assert all(cell in text for cell in row), "no cell is broken"


def test_figures_are_plain_and_agree_with_one_another() -> None:
    found = figures(result("int8-g4/int4-g4", 64, 8192, 200.0, 500.0), MACHINE)
    found = json.loads(json.dumps(found))
    nbytes = 64 * 8 * 8192 * (144 + 80)
    assert [found["k_format"], found["v_format"], found["dtype"]] == [
        "int8-g4",
        "int4-g4",
        "bfloat16",
    ]
    assert found["nbytes"] == nbytes
    assert found["gb_per_s"] == pytest.approx(nbytes / 200e-6 / 1e9)
    assert found["roof_percent"] == pytest.approx(100 * nbytes / 200e-6 / 4000e9)
    assert found["in_a_row_roof_percent"] == pytest.approx(found["roof_percent"] / 0.8)
    assert found["sdpa"]["ratio"] == pytest.approx(2.5)
    assert found["sdpa"]["gb_per_s"] == pytest.approx(64 * 8 * 8192 * 512 / 500e-6 / 1e9)
    assert figures(result("fp8", 1, 128, 9.0), MACHINE)["sdpa"] == {"none": "17.2 GB do not fit"}


def test_series_are_the_shapes_that_show_most() -> None:
    results = [
        result(name, batch, seq_len, 100.0, 200.0)
        for name in ("int4-g4", "fp8")
        for batch, seq_len in ((64, 8192), (1, 8192), (8, 8192), (64, 1024), (8, 1024), (2, 512))
    ]
    title, lines = series(results, MACHINE, "batch")
    assert title == "32:8 heads, T 8192"
    assert set(lines) == {"int4-g4", "fp8", "SDPA, 16 bit"}
    assert [x for x, _ in lines["fp8"]] == [1, 8, 64]
    assert lines["fp8"][2][1] == pytest.approx(100 * 64 * 8 * 8192 * 264 / 80e-6 / 4000e9)
    title, lines = series(results, MACHINE, "seq_len")
    assert title == "32:8 heads, batch 64"
    assert [x for x, _ in lines["SDPA, 16 bit"]] == [1024, 8192]


@pytest.mark.extra("report")
def test_the_picture_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "roof.png"
    check_plot(path)
    plot([result("int4-g4", b, 8192, 100.0 + b, 300.0) for b in (1, 8, 64)], MACHINE, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_drawn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"name it NAME\.png"):
        check_plot(Path("roof.jpg"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UnsupportedError, match="install the extra 'report'"):
        check_plot(Path("roof.png"))
