"""The tensors of a file of rows: which rows and tokens of a cache each holds."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from ..rows.format import RowFormat


@dataclass(frozen=True)
class Part:
    """One tensor of a file: rows of "k" or "v" of one layer.

    Attributes:
        kind: "sinks", "packed" or "recent"; of sequences "pages" or "exact".
        fmt: format of the rows.
        counts: rows of each sequence.
        firsts: the token of the first row of each sequence.
        packed_as: the format that 16-bit rows are packed in later; None if they stay.
        sink_len: first tokens of each sequence, whose rows stay.
    """

    layer: int
    side: str
    kind: str
    fmt: RowFormat
    num_kv_heads: int
    counts: tuple[int, ...]
    firsts: tuple[int, ...]
    packed_as: RowFormat | None = None
    sink_len: int = 0

    @cached_property
    def attribute(self) -> str:
        return f"{self.side}_{self.kind}"

    @cached_property
    def name(self) -> str:
        return f"layers.{self.layer}.{self.attribute}"

    @cached_property
    def num_rows(self) -> int:
        return sum(self.counts)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        return tuple(accumulate(self.counts[:-1], initial=0))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.num_rows, self.num_kv_heads, self.fmt.row_bytes

    def locate(self, row: int) -> tuple[int, int]:
        sequence = bisect_right(self.starts, row) - 1
        return sequence, self.firsts[sequence] + row - self.starts[sequence]

    def by_token(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def in_use(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of the tensor that hold a token: [tokens, num_kv_heads, row_bytes]."""
        return rows


@dataclass(frozen=True)
class PagePart(Part):
    """The pages of "k" or "v" of one layer; counts and firsts are of each page.

    Attributes:
        owners: the first sequence of each page.
        used: how many rows of each page, the first ones, hold a token.
        numbers: of the pages in the file.
    """

    owners: tuple[int, ...] = ()
    used: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """[pages, num_kv_heads, page_size, row_bytes]."""
        return len(self.counts), self.num_kv_heads, self.counts[0], self.fmt.row_bytes

    def locate(self, row: int) -> tuple[int, int]:
        """Sequence and token of a row, counted over all pages."""
        page, token = super().locate(row)
        return self.owners[page], token

    def by_token(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.transpose(1, 2).flatten(0, 1)

    def in_use(self, rows: torch.Tensor) -> torch.Tensor:
        used = torch.tensor(self.used, device="cpu")[:, None]
        return self.by_token(rows)[(torch.arange(self.counts[0], device="cpu") < used).flatten()]


@dataclass(frozen=True)
class ExactPart(Part):
    """16-bit rows of a layer: sinks, then recent tokens, of each sequence; packed_lens between."""

    packed_lens: tuple[int, ...] = ()

    def locate(self, row: int) -> tuple[int, int]:
        sequence, token = super().locate(row)
        return sequence, token + (self.packed_lens[sequence] if token >= self.sink_len else 0)
