"""A sequence is a few segments, each with rows of its own formats, attended as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .errors import ConfigError, DeviceError, ShapeError
from .layout import RowFormat
from .quant import check_rows, dequantize_rows


@dataclass(frozen=True)
class Segment:
    """Rows of K and V that belong to the same tokens.

    Attention does not depend on the order of the rows, so a segment may be a ring.

    Attributes:
        k_rows: [batch, num_kv_heads, capacity, k_format.row_bytes], uint8; rows contiguous, the
            other axes of any strides.
        v_rows: [batch, num_kv_heads, capacity, v_format.row_bytes], likewise.
        seq_lens: [batch], int32: rows in use; 0 is allowed.
        k_format: format of k_rows.
        v_format: format of v_rows; its head_dim may differ.
        starts: [batch], int32: the first row in use, from which the others follow, through the end
            to row 0 (a ring); None for 0.

    Raises:
        ShapeError: the tensors do not fit one another or the formats.
        ConfigError: a dtype is wrong.
    """

    k_rows: torch.Tensor
    v_rows: torch.Tensor
    seq_lens: torch.Tensor
    k_format: RowFormat
    v_format: RowFormat
    starts: torch.Tensor | None = None

    def __post_init__(self) -> None:
        check_rows(self.k_rows, self.k_format, "k_rows")
        check_rows(self.v_rows, self.v_format, "v_rows")
        if self.k_rows.ndim != 4 or self.k_rows.shape[:3] != self.v_rows.shape[:3]:
            raise ShapeError(
                f"k_rows {list(self.k_rows.shape)} and v_rows {list(self.v_rows.shape)} must both "
                "be [batch, num_kv_heads, capacity, row_bytes], alike but for row_bytes"
            )
        for name, rows in (("k_rows", self.k_rows), ("v_rows", self.v_rows)):
            if rows.stride(-1) != 1:
                raise ShapeError(
                    f"{name} has strides {list(rows.stride())}: the bytes of a row must be "
                    "contiguous"
                )
        for name, counts in (("seq_lens", self.seq_lens), ("starts", self.starts)):
            if counts is None:
                continue
            if counts.dtype != torch.int32:
                raise ConfigError(f"{name} is {counts.dtype}: use int32")
            if counts.shape != self.k_rows.shape[:1]:
                raise ShapeError(
                    f"{name} is {list(counts.shape)}: it must be [{self.k_rows.shape[0]}], "
                    "the batch"
                )

    @property
    def capacity(self) -> int:
        """Rows that a sequence has room for."""
        return self.k_rows.shape[2]

    def rows(self, sequence: int, side: str) -> torch.Tensor:
        """Copy the rows of one sequence, of side "k" or "v", in the order of its tokens.

        Returns:
            [num_kv_heads, seq_len, row_bytes], uint8.
        """
        start = 0 if self.starts is None else int(self.starts[sequence])
        index = torch.arange(start, start + int(self.seq_lens[sequence]), device=self.k_rows.device)
        index = index % max(self.capacity, 1)
        rows = self.k_rows if side == "k" else self.v_rows
        return rows[sequence].index_select(1, index)

    def dequantized(self, sequence: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one sequence in the order of its tokens: [num_kv_heads, seq_len, head_dim]."""
        k = dequantize_rows(self.rows(sequence, "k"), self.k_format, dtype)
        return k, dequantize_rows(self.rows(sequence, "v"), self.v_format, dtype)


def make_segment(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    k_format: str | RowFormat,
    v_format: str | RowFormat,
) -> Segment:
    """The segment of loose rows; formats given by name have the head_dim of q."""
    check_query(q)
    k_format = RowFormat.parse(k_format, q.shape[-1])
    if not isinstance(v_format, RowFormat):
        v_format = RowFormat.parse(v_format, q.shape[-1])
    return Segment(k_rows, v_rows, seq_lens, k_format, v_format)


def check_query(q: torch.Tensor) -> None:
    """Raise unless q is [batch, num_q_heads, head_dim]."""
    if q.ndim != 3:
        raise ShapeError(f"q is {list(q.shape)}: it must be [batch, num_q_heads, head_dim]")


def check_segments(q: torch.Tensor, segments: Sequence[Segment]) -> None:
    """Raise unless a query can attend to the segments; on the CPU the lengths are checked too."""
    if not segments:
        raise ShapeError("no segments: attention needs at least one")
    batch, num_q_heads, head_dim = q.shape
    first = segments[0]
    for segment in segments:
        rows_batch, num_kv_heads, capacity, _ = segment.k_rows.shape
        if rows_batch != batch or num_kv_heads == 0 or num_q_heads % num_kv_heads:
            raise ShapeError(
                f"q {list(q.shape)} does not fit rows {list(segment.k_rows.shape)}: the batch must "
                "be the same and num_q_heads a multiple of num_kv_heads"
            )
        if segment.k_format.head_dim != head_dim:
            raise ShapeError(f"q has head_dim {head_dim}, K has {segment.k_format.head_dim}")
        if (
            num_kv_heads != first.k_rows.shape[1]
            or segment.v_format.head_dim != first.v_format.head_dim
        ):
            raise ShapeError("the segments differ in num_kv_heads or in the head_dim of V")
        tensors = (segment.k_rows, segment.v_rows, segment.seq_lens, segment.starts)
        for tensor in tensors:
            if tensor is not None and tensor.device != q.device:
                raise DeviceError(f"q is on {q.device}, rows or lengths on {tensor.device}")
        # reading lengths on a GPU would make the host wait
        if q.device.type == "cpu" and batch:
            shortest, longest = (int(n) for n in segment.seq_lens.aminmax())
            if shortest < 0 or longest > capacity:
                raise ShapeError(
                    f"seq_lens are {shortest} to {longest}, but there is room "
                    f"for 0 to {capacity} rows"
                )
            if segment.starts is not None:
                lowest, highest = (int(n) for n in segment.starts.aminmax())
                if lowest < 0 or highest >= max(capacity, 1):
                    raise ShapeError(
                        f"starts are {lowest} to {highest}, rows are 0 to {capacity - 1}"
                    )
