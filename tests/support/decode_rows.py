"""Packed rows and queries for tests of decode attention on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from relative_l2 import relative_l2

from kvquant import RowFormat, decode_attention, quantize_rows
from kvquant.rows.segment import PAGE_SIZES, RUN

State = tuple[torch.Tensor, torch.Tensor]

INT4 = RowFormat.parse("int4-g4", 64)
BOTH: dict[str, Any] = {"k_format": INT4, "v_format": INT4}
BACKENDS = ("cpu", "reference")
LIMIT = 1e-5  # relative L2 error of float32 output, the promise of the package
# page sizes: one kernel serves the whole ones, each of the small ones has its own
WHOLE = [size for size in PAGE_SIZES if size >= RUN]
SMALL = [size for size in PAGE_SIZES if size < RUN]
RAGGED = (0, 1, 15, 16, 17, 127, 128, 129, 1000)


def lens(*counts: int) -> torch.Tensor:
    return torch.tensor(counts, dtype=torch.int32)


def nan_rows(fmt: RowFormat, *shape: int) -> torch.Tensor:
    """Rows that decode to NaN."""
    return torch.full((*shape, fmt.row_bytes), 255, dtype=torch.uint8)


def packed(x: torch.Tensor, fmt: RowFormat) -> torch.Tensor:
    return quantize_rows(x, fmt, backend="reference")


def make_rows(
    fmt: RowFormat, seq_lens: tuple[int, ...], heads: int, spare: int = 3
) -> torch.Tensor:
    """Rows [batch, heads, longest + spare, row_bytes]; those beyond each length decode to NaN."""
    rows = packed(torch.randn(len(seq_lens), heads, max(seq_lens) + spare, fmt.head_dim), fmt)
    for b, seq_len in enumerate(seq_lens):
        rows[b, :, seq_len:] = 255
    return rows


def call_of(
    seq_lens: tuple[int, ...],
    num_q_heads: int = 8,
    formats: tuple[RowFormat, RowFormat] = (INT4, INT4),
    q_len: int = 0,
) -> Any:
    """q, rows of K and of V with 2 heads, and lengths; q_len 0: q has no such axis."""
    k_rows, v_rows = (make_rows(fmt, seq_lens, 2) for fmt in formats)
    axes = (q_len, num_q_heads) if q_len else (num_q_heads,)
    q = torch.randn(len(seq_lens), *axes, formats[0].head_dim)
    return q, k_rows, v_rows, lens(*seq_lens)


def state(q: torch.Tensor, *args: torch.Tensor, **options: Any) -> State:
    result = decode_attention(q, *args, return_lse=True, backend="cpu", **options)
    assert isinstance(result, tuple)
    return result


def in_pages(
    rows: Sequence[torch.Tensor], seq_lens: torch.Tensor, page_size: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Rows [batch, heads, capacity, row_bytes] in pages in any order, two of which are of nobody.

    Returns:
        Pages of each, NaN where no row is, and their block table, with numbers of no pages in
        places that are not in use.
    """
    used = (-(-seq_lens // page_size)).tolist()
    table = torch.tensor([-7, 2**30]).int()[torch.randint(2, (len(used), max(used) + 1))]
    places = torch.randperm(sum(used) + 2, dtype=torch.int32)[: sum(used)].split(used)
    pools = [x.new_full((sum(used) + 2, x.shape[1], page_size, x.shape[3]), 255) for x in rows]
    for b, own in enumerate(places):
        table[b, : used[b]] = own
        for pool, x in zip(pools, rows, strict=True):
            for page, part in zip(own, x[b].split(page_size, 1), strict=False):
                pool[page, :, : part.shape[1]] = part
    return pools, table


def check_pages(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    sizes: Sequence[int] = WHOLE,
    limit: float = 0.0,
    **formats: Any,
) -> None:
    """The rows in pages give the same bits, or differ by a relative L2 error within a limit."""
    for page_size, num_splits in itertools.product(sizes, (1, 3)):
        pools, table = in_pages((k_rows, v_rows), seq_lens, page_size)
        expected = state(q, k_rows, v_rows, seq_lens, num_splits=num_splits, **formats)
        options = {"block_table": table, "num_splits": num_splits, **formats}
        found = state(q, *pools, seq_lens, **options)
        if limit:
            assert relative_l2(found[0], expected[0]) <= limit, page_size
        else:
            assert all(map(torch.equal, found, expected)), page_size


def hard(kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [2, 8, 64], K and V [2, 2, 300, 64]."""
    q, (k, v) = torch.randn(2, 8, 64), torch.randn(2, 2, 2, 300, 64)
    if kind == "peaked":
        k[:, :, 137] = 20 * k[:, :, 137]
        q[:] = k[:, :, 137].repeat_interleave(4, 1)
    elif kind == "all scores equal":
        k[:] = k[:, :, :1]
    elif kind == "scores zero":
        q.zero_()
    elif kind == "q of 1e4":
        q *= 1e4
    elif kind == "one huge outlier":
        k[:, 1, 13, 5], v[:, 0, 77, 9] = 60000.0, -60000.0
    elif kind == "the greatest scale":
        k[..., ::2], k[..., 1::2] = 65504.0, -65504.0
        v[..., ::2], v[..., 1::2] = -65504.0, 65504.0
        q[..., 1::2] = q[..., ::2] + 1e-4 * q[..., 1::2]
    elif kind == "the least scale":
        k, v = 1e-7 * k, 1e-7 * v
    elif kind == "an offset":
        k, v = 100 + 0.1 * k, 30 + 0.1 * v
    elif kind == "rising scores":  # every tile has a new maximum
        k[:] = q[:, ::4, None] * torch.linspace(-20, 20, 300)[:, None]
    elif kind == "falling scores":
        k[:] = q[:, ::4, None] * torch.linspace(20, -20, 300)[:, None]
    return q, k, v


KINDS = (
    "peaked, all scores equal, scores zero, q of 1e4, one huge outlier, the greatest scale, "
    "the least scale, an offset, rising scores, falling scores"
).split(", ")
