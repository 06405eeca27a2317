"""A sequence is a few segments, each with rows of its own formats, attended as one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .errors import ConfigError, ShapeError
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

    def dequantized(self, sequence: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one sequence in the order of its tokens: [num_kv_heads, seq_len, head_dim]."""
        start = 0 if self.starts is None else int(self.starts[sequence])
        index = torch.arange(start, start + int(self.seq_lens[sequence]), device=self.k_rows.device)
        index = index % max(self.capacity, 1)
        k = dequantize_rows(self.k_rows[sequence].index_select(1, index), self.k_format, dtype)
        v = dequantize_rows(self.v_rows[sequence].index_select(1, index), self.v_format, dtype)
        return k, v
