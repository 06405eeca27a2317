"""Segments: the parts of a sequence, each in rows of its own formats, attended as one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import ShapeError
from .arguments import check_same_device, check_tensor
from .bound import Bound
from .codec import one_of
from .format import RowFormat, check_head_dims
from .indptr import check_indptr
from .latent import LatentFormat
from .quantize import check_rows, dequantize
from .slots import Split

Numbers: TypeAlias = "NDArray[np.integer[Any]]"
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
RUN = 16  # rows of a page that kernels find by one look-up; of a smaller page all


class Segment(NamedTuple):
    """Rows of K and V of the same tokens; check_segments checks the first ones of a call.

    Attention of one query does not depend on the order of rows, so a segment may be a ring. With
    several queries segments are in the order of their tokens, but sinks come before all others. A
    named tuple: a frozen dataclass takes 0.5 microseconds longer.

    Attributes:
        k_rows: [batch, num_kv_heads, capacity, k_format.row_bytes], uint8; rows contiguous, the
            other axes of any strides. With a block_table [num_pages, num_kv_heads, page_size,
            k_format.row_bytes], of pages of 1, 2, 4, 8, 16, 32, 64, 128 or 256 rows.
        v_rows: the same for V, with v_format.row_bytes.
        seq_lens: [batch], int32: rows in use; 0 is allowed.
        k_format: format of k_rows, or its short name ("int4-g4").
        v_format: format of v_rows, whose head_dim may differ, or its short name (then of the
            head_dim of the query).
        starts: [batch], int32: the first row in use; the rows go on past the end at row 0 (a
            ring). None for 0.
        block_table: [batch, max_pages], int32: each sequence's pages in the order of its
            tokens; entries after the last page in use are not read. None: no pages.
        sinks: the first rows hold the first tokens, outside the ring; starts are counted after
            them.
        seq_slots: [batch], int32: the sequence of k_rows and v_rows that each sequence of q
            reads; None for the same one. Segments with pages have neither sinks nor sequence slots.
    """

    k_rows: torch.Tensor
    v_rows: torch.Tensor
    seq_lens: torch.Tensor
    k_format: RowFormat
    v_format: RowFormat
    starts: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    sinks: int = 0
    seq_slots: torch.Tensor | None = None

    @property
    def capacity(self) -> int:
        """Rows that a sequence has room for."""
        pages = 1 if self.block_table is None else self.block_table.shape[1]
        return pages * self.k_rows.shape[2]

    def rows(self, sequence: int, side: str) -> torch.Tensor:
        """The rows of a sequence, side "k" or "v", in token order: [heads, tokens, row_bytes]."""
        rows = self.k_rows if side == "k" else self.v_rows
        seq_len = int(self.seq_lens[sequence])
        split = Split(self.sinks, self.capacity - self.sinks, rows.shape[2])
        if self.block_table is not None:
            pages = self.block_table[sequence, : split.num_pages(seq_len)]
            return rows.index_select(0, pages).transpose(0, 1).flatten(1, 2)[:, :seq_len]
        start = 0 if self.starts is None else int(self.starts[sequence])
        token = torch.arange(seq_len, device=rows.device)
        in_ring = self.sinks + split.ring_row(token - self.sinks + start)
        seq_slot = sequence if self.seq_slots is None else int(self.seq_slots[sequence])
        return rows[seq_slot].index_select(1, torch.where(token < self.sinks, token, in_ring))

    def dequantized(self, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one sequence in token order: [num_kv_heads, seq_len, head_dim], float32."""
        k = dequantize(self.rows(sequence, "k"), self.k_format)
        return k, dequantize(self.rows(sequence, "v"), self.v_format)


def latent_segment(
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    fmt: LatentFormat,
    starts: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    sinks: int = 0,
    seq_slots: torch.Tensor | None = None,
) -> Segment:
    """Latent rows [batch, 1, capacity, row_bytes], or pages of them, as rows of one KV head."""
    latents = rows[..., : fmt.latent.row_bytes]
    # a LatentFormat is the format of K here, and nowhere else
    places = starts, block_table, sinks, seq_slots
    return Segment(rows, latents, seq_lens, fmt, fmt.latent, *places)  # type: ignore[arg-type]


class FixedSegments(tuple[Segment, ...]):
    """Segments of a cache, checked once: their tensors stay. `bound` holds their launches."""

    bound: Bound

    def __new__(cls, segments: Iterable[Segment]) -> FixedSegments:
        made = super().__new__(cls, segments)
        made.bound = Bound()
        return made

    def __reduce__(self) -> tuple[type[FixedSegments], tuple[tuple[Segment, ...]]]:
        return FixedSegments, (tuple(self),)


def parse_formats(q: torch.Tensor, segment: Segment) -> Segment:
    """The segment with formats in place of names; ConfigError for parts of latent rows."""
    head_dim = query_shape(q)[-1]
    k_format, v_format = RowFormat.parse(segment.k_format, head_dim), segment.v_format
    if not isinstance(v_format, RowFormat):
        v_format = RowFormat.parse(v_format, head_dim)
    check_head_dims(k_format, v_format)
    return segment._replace(k_format=k_format, v_format=v_format)


def visible_tokens(seq_lens: torch.Tensor, q_lens: torch.Tensor | None, q_len: int) -> torch.Tensor:
    """How many tokens of its sequence each query sees, from the first: [batch, q_len], int32."""
    row = torch.arange(q_len, dtype=torch.int32, device=seq_lens.device)
    if q_lens is None:
        return (seq_lens[:, None] - q_len + row + 1).clamp(min=0)
    counts = q_lens.clamp(0, q_len)[:, None]  # on CUDA they are not checked
    seen = (seq_lens[:, None] - counts + row + 1).clamp(min=0)
    return seen.masked_fill(row >= counts, 0)


def visible_rows(
    segments: Sequence[Segment], q_lens: torch.Tensor | None, q_len: int
) -> torch.Tensor:
    """How many rows of each segment, from its first, each query sees: [segments, batch, q_len]."""
    lens = torch.stack([segment.seq_lens for segment in segments]).sum(0, dtype=torch.int32)
    return rows_before(segments, visible_tokens(lens, q_lens, q_len))


def rows_before(segments: Sequence[Segment], positions: torch.Tensor) -> torch.Tensor:
    """Rows of each segment with tokens before positions [batch, n]: [segments, batch, n]."""
    parts, before = _parts(segments)
    found = (positions - before[..., None]).clamp(min=0).minimum(parts[..., None])
    of_sinks, of_others = found.chunk(2)
    return of_sinks + of_others


def first_positions(segments: Sequence[Segment]) -> torch.Tensor:
    """The positions of the rows of segments in their sequences, [2, segments, batch], int32.

    Row i (in token order) has position i + result[0] if it is a sink, else i + result[1].
    """
    parts, before = _parts(segments)
    of_sinks, of_others = before.chunk(2)
    return torch.stack([of_sinks, of_others - parts.chunk(2)[0]])


def _parts(segments: Sequence[Segment]) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of each part (all sinks, then other rows), and of those before: int32."""
    lens = torch.stack([segment.seq_lens for segment in segments])
    sinks = torch.stack([segment.seq_lens.clamp(max=segment.sinks) for segment in segments])
    parts = torch.cat([sinks, lens - sinks])
    return parts, parts.cumsum(0, dtype=torch.int32) - parts


def check_segments(
    q: torch.Tensor,
    segments: Sequence[Segment],
    q_lens: torch.Tensor | None = None,
    q_indptr: torch.Tensor | None = None,
) -> None:
    """Raise unless queries can attend to the segments; values in the tensors are not read.

    It checks the first segment: decode_attention has one, and a cache makes its segments alike. It
    runs in every call whose launch CUDA has not kept, so the key in kernels/cuda/decode/launch.py
    must hold all that it reads.

    It raises ShapeError, ConfigError or DeviceError.
    """
    segment, shape = segments[0], query_shape(q)
    batch, num_q_heads, head_dim = shape[0], shape[-2], shape[-1]
    if q_indptr is not None:
        check_indptr(q, q_indptr, q_lens)
        batch = q_indptr.shape[0] - 1
    elif q_lens is not None:
        _check_q_lens(q, q_lens)
    k_rows, v_rows, seq_lens, k_format, _, _, block_table, _, seq_slots = segment
    check_rows(k_rows, segment.k_format, "k_rows")
    check_rows(v_rows, segment.v_format, "v_rows")
    if k_rows.ndim != 4 or k_rows.shape[:3] != v_rows.shape[:3]:
        axes = "[batch, num_kv_heads, capacity, row_bytes]"
        if block_table is not None:
            axes = "[num_pages, num_kv_heads, page_size, row_bytes]"
        raise ShapeError(
            f"k_rows {list(k_rows.shape)} and v_rows {list(v_rows.shape)} must both be {axes}, "
            "alike but for row_bytes"
        )
    for name, rows in (("k_rows", k_rows), ("v_rows", v_rows)):
        if rows.stride(-1) != 1:
            raise ShapeError(
                f"{name} has strides {list(rows.stride())}: the bytes of a row must be contiguous"
            )
    rows_batch, num_kv_heads, length, _ = k_rows.shape
    if block_table is not None:
        if length not in PAGE_SIZES:
            raise ShapeError(f"page_size {length} is not supported: use {one_of(PAGE_SIZES)}")
        check_tensor("block_table", block_table, [torch.int32], ("batch", "max_pages"))
        rows_batch = block_table.shape[0]
    elif seq_slots is not None:
        rows_batch = seq_slots.shape[0]
    check_tensor("seq_lens", seq_lens, [torch.int32], (rows_batch,))
    if rows_batch != batch or num_kv_heads == 0 or num_q_heads % num_kv_heads:
        _refuse_query(q, segment, q_indptr)
    if k_format.head_dim != head_dim:
        raise ShapeError(f"q has head_dim {head_dim}, K has {k_format.head_dim}")
    own = {"k_rows": k_rows, "v_rows": v_rows, "seq_lens": seq_lens, "block_table": block_table}
    check_same_device(q=q, **own)


def query_shape(q: torch.Tensor) -> torch.Size:
    """The shape of queries; ShapeError unless it has three or four axes."""
    shape = q.shape
    if len(shape) != 3 and len(shape) != 4:
        raise ShapeError(
            f"q is {list(shape)}: it must be [batch, num_q_heads, head_dim], or [batch, q_len, "
            "num_q_heads, head_dim] for the last q_len tokens of each sequence"
        )
    return shape


def _check_q_lens(q: torch.Tensor, q_lens: torch.Tensor) -> None:
    check_tensor("q_lens", q_lens, [torch.int32])
    if q.ndim != 4:
        raise ShapeError(
            f"q_lens are given with q {list(q.shape)}: they need q [batch, q_len, num_q_heads, "
            "head_dim]. For q [total, num_q_heads, head_dim] give q_indptr"
        )
    check_tensor("q_lens", q_lens, [torch.int32], q.shape[:1])
    check_same_device(q=q, q_lens=q_lens)


def _refuse_query(q: torch.Tensor, segment: Segment, q_indptr: torch.Tensor | None) -> None:
    rows = f"rows {list(segment.k_rows.shape)}"
    if segment.block_table is not None:
        rows += f" with block_table {list(segment.block_table.shape)}"
    heads, how = segment.k_rows.shape[1], ""
    if q.ndim == 4 and heads and q.shape[2] % heads and not q.shape[1] % heads:
        how = ". q is [batch, q_len, num_q_heads, head_dim]: give q.transpose(1, 2)"
    given = "" if q_indptr is None else f" with q_indptr [batch + 1] {list(q_indptr.shape)}"
    raise ShapeError(
        f"q {list(q.shape)}{given} does not fit {rows}: the batch must be the same and num_q_heads "
        f"a multiple of num_kv_heads{how}"
    )


def check_segment_values(segments: Sequence[Segment]) -> None:
    """Raise ShapeError unless lengths, starts, slots and pages in use exist; not in a capture."""
    for segment in segments:
        if segment.seq_lens.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        lens, capacity = segment.seq_lens.cpu().numpy(), segment.capacity
        _check_range("seq_lens", lens, capacity, f"there is room for 0 to {capacity} rows")
        places = {  # of a ring without rows the start is 0
            "starts": (segment.starts, max(capacity - segment.sinks - 1, 0)),
            "seq_slots": (segment.seq_slots, segment.k_rows.shape[0] - 1),
        }
        for name, (values, last) in places.items():
            if values is not None:
                _check_range(name, values.cpu().numpy(), last, f"{name} are 0 to {last}")
        if segment.block_table is not None:
            _check_page_values(segment, segment.block_table, lens)


def check_q_len_values(q: torch.Tensor, q_lens: torch.Tensor) -> None:
    """Raise ShapeError unless counts are 0 to the q_len of q; nothing while capturing a graph."""
    if not (q_lens.is_cuda and torch.cuda.is_current_stream_capturing()):
        q_len = q.shape[1]
        _check_range("q_lens", q_lens.cpu().numpy(), q_len, f"q has room for 0 to {q_len} queries")


def _check_page_values(segment: Segment, block_table: torch.Tensor, lens: Numbers) -> None:
    """Check the entries in use only: a table is as wide as the longest sequence allowed."""
    num_pages, _, page_size, _ = segment.k_rows.shape
    used = -(-lens // page_size)
    table = block_table[:, : used.max(initial=0)].cpu().numpy()
    sequence = np.repeat(np.arange(len(used)), used)
    entry = np.arange(len(sequence)) - np.repeat(np.cumsum(used) - used, used)
    pages, allowed = table[sequence, entry], f"pages are 0 to {num_pages - 1}"
    _check_range("block_table", pages, num_pages - 1, allowed, sequence, entry)


def _check_range(name: str, values: Numbers, last: int, allowed: str, *place: Numbers) -> None:
    """Raise unless values, one for each sequence or each (sequence, entry), are 0 to last."""
    if not values.size or (values.min() >= 0 and values.max() <= last):
        return
    at = int(((values < 0) | (values > last)).argmax())
    sequence, *entry = [int(one[at]) for one in place] or [at]
    where = f", entry {entry[0]}," if entry else ""
    raise ShapeError(f"{name} of sequence {sequence}{where} is {int(values[at])}: {allowed}")
