"""Cases of decode attention, for the simulator and for GPUs: what is called, what is to come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from devices import moved
from query_cases import make_variant

from kvquant import AttentionVariant, RowFormat, quantize_rows
from kvquant.engine.contract import PageLayout
from kvquant.rows.codec import FP16_MAX
from kvquant.rows.reference import reference_over_segments
from kvquant.rows.segment import Segment

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NAN = 0xFF  # bytes of NaN: rows and pages that are not in use


@dataclass
class Case:
    """What a kernel is made for and called with.

    Attributes:
        k, v: formats of the first segment; v is that of k if empty.
        v_head_dim: head_dim if 0.
        heads: query heads and KV heads.
        place: "linear", "ring" or "paged", of the first segment.
        sinks: rows before the ring, in every ring.
        seated: sequences of rings lie in another order, and among others.
        layout: of rows: "heads" (a head's rows follow one another), "odd heads" (and heads do not
            start at multiples of 16 bytes), "tokens" (a token's heads follow one another), or
            "planes": of pages, as an engine's PageLayout has them.
        splits: of each segment; 0 for a second or third one that is missing.
        workers: blocks that share the work where lengths differ; 0: none.
        exact: codec of the second and third segment, or "" for the first one only.
        exact_lens: tokens of each sequence in these.
        overlong: tell the kernel of more tokens than there is room for, where all room is taken.
        want_lse: whether the kernel writes the lse.
        k_scale, v_scale: factors on the values of K and V, which are cut where fp16 ends.
        q_len: queries of each sequence; 0: one, and q without an axis of them.
        q_lens: of each sequence, less than that; None: all.
        ragged: q is [total, ...]: q_lens of each sequence, one behind another.
        rest: rows of a ragged q behind them.
        variant: fields of AttentionVariant, each with its value or, of a tensor, a random one;
            pages before a window are not to be looked up.
        wide: fields of the spec of the kernel for wide groups that differ. With this kernel all
            ragged queries are in pieces of one kind, the last one. None for the other kernel.
    """

    k: str = "int4-g4"
    v: str = ""
    head_dim: int = 128
    v_head_dim: int = 0
    lens: Sequence[int] = (33, 0, 100)
    heads: Sequence[int] = (8, 1)
    query: str = "bf16"
    q_scale: float = 1.0
    place: str = "linear"
    sinks: int = 0
    seated: bool = False
    page_size: int = 16
    layout: str = "heads"
    splits: Sequence[int] = (1,)
    warps: int = 1
    stages: int = 2
    workers: int = 0
    exact: str = ""
    exact_lens: Sequence[Sequence[int]] = ((4, 0, 2), (40, 3, 0))
    overlong: bool = False
    want_lse: bool = True
    columns: int = 8
    sharers: int = 1
    k_scale: float = 1.0
    v_scale: float = 1.0
    q_len: int = 0
    q_lens: Sequence[int] | None = None
    ragged: bool = False
    rest: int = 0
    variant: dict[str, Any] = field(default_factory=dict)
    wide: dict[str, Any] | None = None


class Call(NamedTuple):
    """Of a case: what a launcher gets, and out and lse in float64.

    Attributes:
        q: with NaN in its padding, inside of more NaN.
        segments: as the launcher gets them.
        q_lens, q_indptr, variant: of the call.
        out, lse: what is to come.
    """

    q: torch.Tensor
    segments: list[Segment]
    q_lens: torch.Tensor | None
    q_indptr: torch.Tensor | None
    variant: AttentionVariant
    out: torch.Tensor
    lse: torch.Tensor

    def on(self, device: str) -> Call:
        """On another device."""
        made: Call = moved(self, device)
        return made


def make_call(case: Case) -> Call:
    """Random queries and rows."""
    torch.manual_seed(0)
    batch, num_q_heads, dim = len(case.lens), case.heads[0], case.head_dim
    plain, segments = make_segments(case)
    around = torch.full((batch, num_q_heads + 2, dim), torch.nan, dtype=DTYPES[case.query])
    q_lens = q_indptr = None
    if case.ragged:
        assert case.q_lens is not None
        q_indptr = torch.tensor([0, *accumulate(case.q_lens)], dtype=torch.int32)
        around = around[:1].repeat(sum(case.q_lens) + case.rest, 1, 1)
    elif case.q_len:
        around = around[:, None].repeat(1, case.q_len, 1, 1)
    q = around[..., 1:-1, :]
    q.copy_(torch.randn(q.shape) * case.q_scale)
    if case.ragged and case.rest:
        q[-case.rest :] = torch.nan
    elif case.q_len:
        q_lens = torch.tensor(case.q_lens or [case.q_len] * batch, dtype=torch.int32)
        q[torch.arange(case.q_len) >= q_lens[:, None]] = torch.nan
    variant = make_variant(case.variant, q, plain, q_lens)
    expected = reference_over_segments(q, plain, None, q_lens, variant, q_indptr)
    given = q_lens if case.q_lens else None
    return Call(q, segments, given, q_indptr, variant, *expected)


def make_segments(case: Case) -> tuple[list[Segment], list[Segment]]:
    """Those that have splits: as plain ones for the reference, and as the launcher gets them."""
    v_dim = case.v_head_dim or case.head_dim
    kinds = [(case.k, case.v or case.k, case.place, case.lens)]
    if case.exact:
        kinds += [(case.exact, case.exact, "ring", lens) for lens in case.exact_lens]
    made = [
        make_segment(
            case, RowFormat.parse(k, case.head_dim), RowFormat.parse(v, v_dim), place, lens
        )
        for (k, v, place, lens), splits in zip(kinds, case.splits, strict=True)
        if splits
    ]
    plain, segments = zip(*made, strict=True)
    return list(plain), list(segments)


def make_segment(
    case: Case, k_format: RowFormat, v_format: RowFormat, place: str, lens: Sequence[int]
) -> tuple[Segment, Segment]:
    """Random rows: in order for the reference, and where the kernel finds them."""
    page_size = case.page_size if place == "paged" else 1
    room = max([1, *lens]) + (0 if case.overlong else 5)
    unit = page_size if place == "paged" else 16
    capacity = -(-room // unit) * unit + (case.layout == "odd heads")
    max_pages = capacity // page_size
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    rows: list[torch.Tensor] = []
    for fmt, scale in ((k_format, case.k_scale), (v_format, case.v_scale)):
        values = torch.randn(len(lens), case.heads[1], capacity, fmt.head_dim) * 1.5 + 0.5
        rows.append(quantize_rows((scale * values).clamp(-FP16_MAX, FP16_MAX), fmt))
        for b, seq_len in enumerate(lens):
            rows[-1][b, :, seq_len:] = NAN
    told = seq_lens
    if case.overlong:
        told = torch.where(seq_lens == capacity, capacity + 1000, seq_lens)
    sinks = min(case.sinks, capacity - 1) if place == "ring" else 0
    # these rows are in order, but come before other segments
    plain = Segment(rows[0], rows[1], seq_lens, k_format, v_format, sinks=sinks)
    starts = table = seq_slots = None
    if place == "ring":
        starts = torch.randint(0, capacity - sinks, (len(lens),), dtype=torch.int32)
        rows = [one.clone() for one in rows]
        for one in rows:
            for row, start in zip(one, starts.tolist(), strict=True):
                row[:, sinks:] = row[:, sinks:].roll(start, 1)
        if case.seated:
            seq_slots = torch.randperm(len(lens) + 2, dtype=torch.int32)[: len(lens)]
            rows = [seq_slot(one, seq_slots) for one in rows]
    elif place == "paged":
        table = torch.randperm(len(lens) * max_pages, dtype=torch.int32).view(len(lens), -1)
        rows = [to_pages(one, page_size, table) for one in rows]
        # pages that are not in use, and those before a window, are never looked up
        numbers = torch.tensor(case.q_lens or [max(case.q_len, 1)] * len(lens))
        begin = (seq_lens - numbers - case.variant.get("window", 1 << 30) + 1).clamp(min=0)
        page, end = torch.arange(max_pages), -(-seq_lens // page_size)
        used = (page < end[:, None]) & (page >= begin[:, None] // page_size)
        table = torch.where(used, table, -1)
    if case.layout == "tokens":
        rows = [one.transpose(1, 2).contiguous().transpose(1, 2) for one in rows]
    elif case.layout == "planes":
        layout = PageLayout(k_format, v_format, case.heads[1])
        pages = torch.empty(*rows[0].shape[:3], layout.token_bytes, dtype=torch.uint8)
        for view, one in zip(layout.views(pages), rows, strict=True):
            view.copy_(one)
        rows = [*layout.views(pages)]
    found = rows[0], rows[1], told, k_format, v_format, starts, table, sinks, seq_slots
    return plain, Segment(*found)


def seq_slot(rows: torch.Tensor, seq_slots: torch.Tensor) -> torch.Tensor:
    """Sequences at their sequence slots, the others NaN."""
    store = torch.full((len(seq_slots) + 2, *rows.shape[1:]), NAN, dtype=torch.uint8)
    store[seq_slots.long()] = rows
    return store


def to_pages(rows: torch.Tensor, page_size: int, table: torch.Tensor) -> torch.Tensor:
    """Pages [num_pages, num_kv_heads, page_size, row_bytes], some of which nobody uses."""
    batch, heads, _, row_bytes = rows.shape
    pages = torch.full((table.numel() + 2, heads, page_size, row_bytes), NAN, dtype=torch.uint8)
    pages[table.long()] = rows.view(batch, heads, -1, page_size, row_bytes).transpose(1, 2)
    return pages
