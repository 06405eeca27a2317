"""Rows in pages: what fits, what is read, and which values are refused where."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from kvquant import RowFormat, backends, debug, decode_attention, quantize_rows, reference_attention
from kvquant.attention import attend_segments
from kvquant.errors import ConfigError, DeviceError, ShapeError, UnsupportedError
from kvquant.segments import Segment, check_segments

INT4 = RowFormat.parse("int4-g4", 64)
INT8 = RowFormat.parse("int8", 96)
FORMATS: dict[str, Any] = {"k_format": INT4, "v_format": INT8}
LENS = (33, 0, 64, 1)
Measure = Callable[[torch.Tensor, torch.Tensor], float]


def int32(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def paged(page_size: int, lens: Sequence[int] = LENS) -> tuple[Segment, Segment]:
    """The same tokens without pages, and in pages in any order; all else is 0xFF, or no page."""
    capacity = -(-max(lens) // page_size) * page_size
    table = torch.full((len(lens), capacity // page_size + 1), -7, dtype=torch.int32)
    used = [-(-seq_len // page_size) for seq_len in lens]
    places = torch.randperm(sum(used) + 3)[: sum(used)].split(used)
    linear, pages = [], []
    for fmt in (INT4, INT8):
        rows = quantize_rows(torch.randn(len(lens), 2, capacity, fmt.head_dim), fmt)
        pool = torch.full((sum(used) + 3, 2, page_size, fmt.row_bytes), 255, dtype=torch.uint8)
        for b, seq_len in enumerate(lens):
            rows[b, :, seq_len:] = 255
            table[b, : used[b]] = places[b]
            pool[places[b]] = rows[b].unflatten(1, (-1, page_size)).transpose(0, 1)[: used[b]]
        linear.append(rows)
        pages.append(pool)
    seq_lens = int32(*lens)
    return (
        Segment(linear[0], linear[1], seq_lens, INT4, INT8),
        Segment(pages[0], pages[1], seq_lens, INT4, INT8, block_table=table),
    )


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_pages_hold_the_rows_in_the_order_of_the_tokens(page_size: int) -> None:
    linear, segment = paged(page_size)
    assert segment.block_table is not None
    assert segment.capacity == segment.block_table.shape[1] * page_size
    for b, seq_len in enumerate(LENS):
        for side in "kv":
            rows = segment.rows(b, side)
            assert rows.shape[1] == seq_len
            assert torch.equal(rows, linear.rows(b, side))


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_only_rows_in_use_are_read(page_size: int) -> None:
    linear, segment = paged(page_size)
    q = torch.randn(len(LENS), 4, 64)
    expected = reference_attention(q, *linear[:3], **FORMATS)
    table = segment.block_table
    results: Any = reference_attention(q, *segment[:3], block_table=table, **FORMATS)
    assert all(map(torch.equal, results, expected))
    options = FORMATS | {"return_lse": True, "backend": "reference"}
    results = decode_attention(q, *segment[:3], block_table=table, **options)
    assert torch.equal(results[0], expected[0].float())
    assert torch.equal(results[1], expected[1].float())


def test_pages_and_other_segments_are_attended_as_one_sequence(relative_l2: Measure) -> None:
    linear, segment = paged(16)
    sinks = linear._replace(seq_lens=int32(4, 0, 0, 1))
    q = torch.randn(len(LENS), 4, 64)
    options: dict[str, Any] = {"backend": "reference"}
    out = attend_segments(q, [segment, sinks], **options)
    expected = attend_segments(q, [linear, sinks], **options)
    assert isinstance(out, torch.Tensor) and isinstance(expected, torch.Tensor)
    assert relative_l2(out, expected) < 1e-6


def test_the_cpu_kernel_refuses_pages_by_name() -> None:
    _, segment = paged(16)
    with pytest.raises(UnsupportedError, match="pages yet: pass backend='reference', or use CUDA"):
        decode_attention(
            torch.zeros(len(LENS), 4, 64), *segment[:3], block_table=segment.block_table, **FORMATS
        )


@pytest.mark.parametrize("max_pages", [0, 2])
def test_a_pool_without_pages_serves_empty_sequences(max_pages: int) -> None:
    segment = Segment(
        torch.empty(0, 2, 16, INT4.row_bytes, dtype=torch.uint8),
        torch.empty(0, 2, 16, INT8.row_bytes, dtype=torch.uint8),
        int32(0, 0, 0),
        INT4,
        INT8,
        block_table=torch.full((3, max_pages), -1, dtype=torch.int32),
    )
    assert segment.capacity == 16 * max_pages
    out = attend_segments(torch.randn(3, 4, 64), [segment], backend="reference")
    assert isinstance(out, torch.Tensor)
    assert out.shape == (3, 4, 96) and not out.any()


def test_what_does_not_fit_is_refused() -> None:
    _, good = paged(16)
    k_rows, v_rows, lens, table = good.k_rows, good.v_rows, good.seq_lens, good.block_table
    assert table is not None
    odd_pages = {"k_rows": k_rows[:, :, :15], "v_rows": v_rows[:, :, :15]}
    short_pages = {"k_rows": k_rows[:, :, :8], "v_rows": v_rows[:, :, :8]}
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        (odd_pages, ShapeError, "page_size 15 is not supported: use 16, 32, 64 or 128"),
        (short_pages, ShapeError, "page_size 8 is not supported: use 16, 32, 64 or 128"),
        ({"block_table": table.long()}, ConfigError, "block_table is torch.int64: use int32"),
        ({"block_table": table[0]}, ShapeError, "block_table is [5]: it must be [batch, max_pages"),
        ({"block_table": table[:3]}, ShapeError, "seq_lens is [4]: it must be [3], the batch"),
        (
            {"block_table": table[:3], "seq_lens": lens[:3]},
            ShapeError,
            "q [4, 4, 64] does not fit rows [11, 2, 16, 48] with block_table [3, 5]",
        ),
        ({"block_table": table.to("meta")}, DeviceError, "q is on cpu, rows or lengths on meta"),
        ({"starts": lens}, ConfigError, "starts (a ring) or a block_table (pages), not both"),
        (
            {"v_rows": v_rows[:5]},
            ShapeError,
            "must both be [num_pages, num_kv_heads, page_size, row_bytes], alike",
        ),
    ]
    q = torch.zeros(4, 4, 64)
    check_segments(q, [good])
    for change, error, message in cases:
        with pytest.raises(error) as caught:
            check_segments(q, [good._replace(**change)])
        assert message in str(caught.value)


def test_values_that_do_not_exist_are_named() -> None:
    linear, segment = paged(16)
    assert segment.block_table is not None
    lens, table = segment.seq_lens, segment.block_table
    num_pages = segment.k_rows.shape[0]
    too_high, below = table.clone(), table.clone()
    too_high[2, 3], below[0, 0] = num_pages, -1
    pages = f"pages are 0 to {num_pages - 1}"
    cases: list[tuple[Segment, str]] = [
        (segment._replace(seq_lens=lens + 64), "seq_lens of sequence 0 is 97: there is room for 0"),
        (segment._replace(seq_lens=lens - 1), "seq_lens of sequence 1 is -1: there is room for 0"),
        (segment._replace(block_table=too_high), f"sequence 2, entry 3, is {num_pages}: {pages}"),
        (
            segment._replace(block_table=below),
            f"block_table of sequence 0, entry 0, is -1: {pages}",
        ),
        (segment._replace(seq_lens=lens + 16), f"sequence 0, entry 3, is -7: {pages}"),
        (linear._replace(starts=int32(0, 0, 64, 0)), "starts of sequence 2 is 64: rows are 0 to"),
    ]
    debug.check_values([linear, segment])
    for bad, message in cases:
        with pytest.raises(ShapeError) as caught:
            debug.check_values([bad])
        assert message in str(caught.value)
        with pytest.raises(ShapeError):
            attend_segments(torch.zeros(4, 4, 64), [bad], backend="reference")


@pytest.mark.parametrize("enabled", [False, True], ids=["usual", "debug mode"])
def test_values_on_another_device_are_read_in_debug_mode_only(
    enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, segment = paged(16)
    q = torch.zeros(len(LENS), 4, 64, device="meta")
    parts: list[Any] = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in segment]
    on_meta = Segment(*parts)
    launched: list[torch.Tensor] = []
    checked: list[list[Segment]] = []

    def kernel(q: torch.Tensor, *_: object) -> tuple[torch.Tensor, None]:
        launched.append(q)
        return q, None

    monkeypatch.setattr(debug, "enabled", enabled)
    monkeypatch.setattr(debug, "check_values", checked.append)
    monkeypatch.setattr(backends, "_choose_kernel", lambda *_: kernel)
    attend_segments(q, [on_meta])
    assert len(launched) == 1
    assert checked == ([[on_meta]] if enabled else [])


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
