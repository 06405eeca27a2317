"""Rows in pages: what fits, what is read, and which values are refused where."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attend import attend_segments
from decode_rows import INT4, in_pages, make_rows
from decode_rows import lens as int32

from kvquant import RowFormat, debug, decode_attention
from kvquant.errors import ShapeError
from kvquant.rows.segment import Segment, check_segment_values

INT8 = RowFormat.parse("int8", 96)
FORMATS: dict[str, Any] = {"k_format": INT4, "v_format": INT8}
LENS = (33, 0, 64, 1)
BACKENDS = pytest.mark.parametrize("backend", ["reference", "cpu"])


def paged(page_size: int, lens: tuple[int, ...] = LENS) -> tuple[Segment, Segment]:
    """The same tokens without pages and in pages; all else is 0xFF, or no page."""
    rows, seq_lens = [make_rows(fmt, lens, 2, 0) for fmt in (INT4, INT8)], int32(*lens)
    linear = Segment(rows[0], rows[1], seq_lens, INT4, INT8)
    (k_rows, v_rows), table = in_pages(rows, seq_lens, page_size)
    return linear, linear._replace(k_rows=k_rows, v_rows=v_rows, block_table=table)


def test_pages_and_their_table_may_have_any_strides() -> None:
    linear, segment = paged(32, (700, 0, 129, 1, 256))
    k_rows, v_rows, table = segment.k_rows, segment.v_rows, segment.block_table
    assert table is not None
    by_token = [rows.transpose(1, 2).contiguous().transpose(1, 2) for rows in (k_rows, v_rows)]
    spread = [torch.full((2 * len(rows), 5, 70, 103), 255, dtype=torch.uint8) for rows in by_token]
    for i, rows in enumerate((k_rows, v_rows)):
        view = spread[i][1::2, 1:4:2, 3:67:2, 1 : 1 + rows.shape[3]]
        view.copy_(rows)
        spread[i] = view
    wide = torch.full((9, 3 * table.shape[1]), 2**30, dtype=torch.int32)
    wide[::2, 1::3] = table
    q = torch.randn(5, 4, 64)
    expected = decode_attention(q, *linear[:3], **FORMATS)
    for k_pages, v_pages in ((k_rows, v_rows), by_token, spread):
        for entries in (table, table.T.contiguous().T, wide[::2, 1::3]):
            options = FORMATS | {"block_table": entries}
            out = decode_attention(q, k_pages, v_pages, segment.seq_lens, **options)
            assert torch.equal(out, expected)


@BACKENDS
@pytest.mark.parametrize("max_pages", [0, 2])
def test_a_pool_without_pages_serves_empty_sequences(max_pages: int, backend: str) -> None:
    segment = Segment(
        torch.empty(0, 2, 16, INT4.row_bytes, dtype=torch.uint8),
        torch.empty(0, 2, 16, INT8.row_bytes, dtype=torch.uint8),
        int32(0, 0, 0),
        INT4,
        INT8,
        block_table=torch.full((3, max_pages), -1, dtype=torch.int32),
    )
    assert segment.capacity == 16 * max_pages
    out = attend_segments(torch.randn(3, 4, 64), [segment], backend=backend)
    assert out.shape == (3, 4, 96) and not out.any()


def test_values_that_do_not_exist_are_named() -> None:
    linear, segment = paged(16)
    assert segment.block_table is not None
    lens, table = segment.seq_lens, segment.block_table
    num_pages = segment.k_rows.shape[0]
    too_high, below = table.clone(), table.clone()
    too_high[2, 3], below[0, 0] = num_pages, -1
    pages, nowhere = f"pages are 0 to {num_pages - 1}", int(table[0, 3])
    cases: list[tuple[Segment, str]] = [
        (segment._replace(seq_lens=lens + 64), "seq_lens of sequence 0 is 97: there is room for 0"),
        (segment._replace(seq_lens=lens - 1), "seq_lens of sequence 1 is -1: there is room for 0"),
        (segment._replace(block_table=too_high), f"sequence 2, entry 3, is {num_pages}: {pages}"),
        (
            segment._replace(block_table=below),
            f"block_table of sequence 0, entry 0, is -1: {pages}",
        ),
        (
            segment._replace(seq_lens=lens + 16),
            f"sequence 0, entry 3, is {nowhere}: {pages}",
        ),
        (linear._replace(starts=int32(0, 0, 0, 64)), "starts of sequence 3 is 64: starts are 0 to"),
        (linear._replace(seq_slots=int32(0, -1, 2, 3)), "seq_slots of sequence 1 is -1: seq_slots"),
        (linear._replace(seq_slots=int32(0, 1, 4, 3)), "seq_slots of sequence 2 is 4: seq_slots"),
    ]
    check_segment_values([linear, segment])
    for bad, message in cases:
        with pytest.raises(ShapeError) as caught:
            check_segment_values([bad])
        assert message in str(caught.value)
        for backend in ("reference", "cpu"):
            with pytest.raises(ShapeError):
                attend_segments(torch.zeros(4, 4, 64), [bad], backend=backend)


@pytest.fixture
def _reloaded() -> Iterator[None]:
    yield
    importlib.reload(debug)


@pytest.mark.usefixtures("_reloaded")
@pytest.mark.parametrize("value", ["1", "0", "", None])
def test_debug_mode_comes_from_the_environment(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        if value is None:
            patch.delenv("KVQUANT_DEBUG", raising=False)
        else:
            patch.setenv("KVQUANT_DEBUG", value)
        assert importlib.reload(debug).enabled == (value == "1")
