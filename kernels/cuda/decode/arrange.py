"""Segments as the decode kernel takes them: their order, their paths, their arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kvquant.errors import ConfigError, UnsupportedError
from kvquant.rows.arguments import check_cuda_scale
from kvquant.rows.format import RowFormat
from kvquant.rows.segment import Segment

from ..device.row_layout import UNIT, StagedRow
from ..runtime.tensors import refuse_rows
from .spec import HALF, POSITIONAL, DecodeSpec, Path, columns_of

MOST_TOKENS = 1 << 30  # positions are int32, and a tile may end beyond the last token
CODECS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
LOG2_E = math.log2(math.e)


def codec_of(name: str, q: torch.Tensor) -> str:
    """The codec of queries, for a spec; ConfigError unless they are of 16 bit."""
    if q.dtype not in CODECS:
        raise ConfigError(f"{name} is {q.dtype}: on CUDA use bfloat16 or float16")
    return CODECS[q.dtype]


def log2_scale(sm_scale: float) -> float:
    """The factor on q·k in powers of two; masks and maxima count on its being positive."""
    return check_cuda_scale(sm_scale) * LOG2_E


def arrange(segments: Sequence[Segment]) -> tuple[int, ...]:
    """Order the segments that have room, as indices: first the one with a path of its own.

    UnsupportedError if no segment leaves others that share a path.
    """
    used = [i for i, segment in enumerate(segments) if segment.capacity]

    def rank(i: int) -> tuple[bool, bool, int]:
        one = segments[i]
        return one.block_table is None, one.k_format.is_exact, -one.capacity

    for first in sorted(used, key=rank):
        others = [i for i in used if i != first]
        kinds = {(segments[i].k_format, segments[i].v_format) for i in others}
        paged = any(segments[i].block_table is not None for i in others)
        if len(others) <= 2 and len(kinds) <= 1 and not paged:
            return (first, *others)
    if not used:
        return ()
    kinds_text = ", ".join(_describe(segments[i]) for i in used)
    raise UnsupportedError(
        f"no CUDA kernel attends to these segments together: {kinds_text}. There may be one of any "
        "kind, and two more of one pair of formats, without block tables"
    )


def arrange_in_order(segments: Sequence[Segment]) -> tuple[int, ...]:
    """The same where positions count: in the order of the tokens (positions.py).

    UnsupportedError if there are more than two, the second has pages, or both have sinks.
    """
    used = [i for i, segment in enumerate(segments) if segment.capacity]
    others = [segments[i] for i in used[1:]]
    sinks = [i for i in used if segments[i].sinks]
    if len(used) <= 2 and len(sinks) <= 1 and all(one.block_table is None for one in others):
        return tuple(used)
    kinds = ", ".join(_describe(segments[i]) for i in used)
    raise UnsupportedError(
        f"no CUDA kernel attends several queries a sequence, or with any of "
        f"{', '.join(sorted(POSITIONAL))}, to these segments together: {kinds}. There may be one "
        "of any kind and, for tokens after it, one without a block table, at most one of them with "
        "sinks. Attend to each query in a call of its own, with the lengths that it sees, or pass "
        "backend='reference'"
    )


def make_spec(
    segments: Sequence[Segment],
    query: str,
    columns: int,
    *,
    causal: bool = False,
    variant: tuple[str, ...] = (),
) -> DecodeSpec:
    """The kernel for arranged segments, with any warps and stages.

    columns: query heads of a KV head, of all queries. causal: whether a sequence has several
    queries. variant: fields in use. ConfigError if rows are not aligned, UnsupportedError if a
    format has no kernel or there are too many rows.
    """
    for segment in segments:
        _check(segment)
    first, others = segments[0], segments[1:]
    formats = [fmt for one in segments for fmt in (one.k_format, one.v_format)]
    of_warp, sharers = columns_of(columns, *formats)
    place = place_of(first)
    run = min(first.k_rows.shape[2], HALF) if place == "paged" else HALF
    second = Path(others[0].k_format, others[0].v_format, "ring", False) if others else None
    dense = place != "ring" and run == HALF and _is_dense(first)
    return DecodeSpec(
        Path(first.k_format, first.v_format, place, dense, run),
        second,
        query,
        columns=of_warp,
        sharers=sharers,
        causal=causal,
        variant=variant,
    )


def place_of(segment: Segment) -> str:
    """ "linear", "ring" (of rows that are found by a start or a sequence slot) or "paged"."""
    if segment.block_table is not None:
        return "paged"
    return "linear" if segment.starts is None and segment.seq_slots is None else "ring"


def arguments(segment: Segment, splits: int) -> tuple[int, ...]:
    k, v, table = segment.k_rows, segment.v_rows, segment.block_table
    page_shift = table_stride = 0
    if table is not None:
        page_shift = k.shape[2].bit_length() - 1
        table_stride = packed_stride(table)
    return (
        stride_of(k, 0),
        stride_of(k, 1),
        stride_of(v, 0),
        stride_of(v, 1),
        stride_of(k, 2),
        stride_of(v, 2),
        segment.capacity,
        segment.sinks,
        segment.capacity - segment.sinks,
        page_shift,
        table_stride,
        splits,
    )


def counts_of(segment: Segment) -> tuple[torch.Tensor | None, ...]:
    """Lengths, starts or block table, and sequence slots: of each the kernel takes one address."""
    _, _, lens, _, _, starts, table, _, seq_slots = segment
    return lens, starts if table is None else table, seq_slots


def pack_counts(counts: torch.Tensor | None) -> torch.Tensor | None:
    """Counts, or a block table, as the kernel reads them: the numbers of a row without gaps."""
    if counts is None or (counts.ndim == 2 and is_row_contiguous(counts)):
        return counts
    return counts.contiguous()  # itself, if it is


def is_row_contiguous(table: torch.Tensor) -> bool:
    """Whether the entries of a sequence follow one another."""
    return table.stride(1) == 1 or table.shape[1] <= 1


def packed_stride(table: torch.Tensor) -> int:
    """Numbers from one sequence's entries to the next one's in what pack_counts gives."""
    return table.stride(0) if is_row_contiguous(table) else table.shape[1]


def stride_of(rows: torch.Tensor, axis: int) -> int:
    """Bytes from one to the next along an axis; 0 if there is no next."""
    return rows.stride(axis) if rows.shape[axis] > 1 else 0


def _is_dense(segment: Segment) -> bool:
    """Whether rows follow one another without gaps, in runs that start at multiples of 16 bytes."""
    return all(
        (rows.shape[2] == 1 or rows.stride(2) == fmt.row_bytes)
        and not any(n % UNIT for n in (rows.data_ptr(), stride_of(rows, 0), stride_of(rows, 1)))
        for _, rows, fmt in _sides(segment)
    )


def _check(segment: Segment) -> None:
    paged = segment.block_table is not None
    if segment.capacity > MOST_TOKENS:
        raise UnsupportedError(
            f"room for {segment.capacity} tokens a sequence is too much for CUDA: at most "
            f"{MOST_TOKENS}"
        )
    for name, rows, fmt in _sides(segment):
        staged = StagedRow(fmt)
        # realigned rows of a page are found by where the page starts
        whole = UNIT if paged and staged.realigned else staged.alignment
        starts = (rows.data_ptr(), stride_of(rows, 0), stride_of(rows, 1))
        if any(n % whole for n in starts) or stride_of(rows, 2) % staged.alignment:
            what = "pages" if paged else "rows"
            refuse_rows(name, rows, f"{what} of {fmt} must be aligned to {whole} bytes")
        if stride_of(rows, 2) >= 1 << 31:
            raise UnsupportedError(
                f"{name} has strides {list(rows.stride())}: on CUDA the rows of a sequence must be "
                "less than 2 GiB apart"
            )


def _sides(segment: Segment) -> tuple[tuple[str, torch.Tensor, RowFormat], ...]:
    return (
        ("k_rows", segment.k_rows, segment.k_format),
        ("v_rows", segment.v_rows, segment.v_format),
    )


def _describe(segment: Segment) -> str:
    place = place_of(segment)
    return f"{segment.k_format}/{segment.v_format} {place} of {segment.capacity}"
