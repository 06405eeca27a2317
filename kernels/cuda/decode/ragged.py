"""Ragged queries on CUDA: pieces, which the decode kernel takes for sequences.

    q_indptr ─▶ pieces.py: one launch ─▶ pieces of 1 or 2 queries ─▶ a decode kernel (positions.py)
                                      ─▶ pieces of up to 16       ─▶ then another decode kernel

A piece is up to `size` consecutive queries: the last ones of its sequence cut off after them. q,
out and lse stay where they are.

A kernel for few columns is fastest for a single query, one for many reads a chunk's rows least
often. So there are kinds of pieces, chosen by a sequence's number of queries. The host does not
know these, so it launches a decode kernel for each kind that may occur; each writes the rows of its
own sequences. Blocks beyond the last piece end at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvquant.rows.format import RowFormat

from ..runtime.launch import Launch, cached_launch
from ..runtime.spec import Spec, Table
from .spec import columns_of

# columns of a piece, unless one query has more: with fewer the rows of a long prompt are read more
# often, with more the warps of a single query idle. Chosen without a GPU, not measured
MOST_COLUMNS = 64
EVERY = (1 << 31) - 1  # queries: no sequence has more
WORDS = 4  # of a piece: its sequence, its first row of q, its queries, those after them
PIECE_BYTES = 4 * WORDS
KINDS = "one", "two", "three"  # at most: small pieces, those of the mean, large ones
KIND: Table = (
    ("least", "i"),  # queries of a sequence
    ("most", "i"),
    ("size", "i"),  # queries of a piece
    ("room", "i"),  # pieces that there may be
    ("row", "i"),  # of `pieces`, where they begin
)
CUT: Table = (
    ("q_indptr", "P"),  # [batch + 1], int32
    # [rows, WORDS], int32: for each kind room for its pieces, then a row with the number of pieces
    # that the kernel has made
    ("pieces", "P"),
    ("batch", "i"),
    ("total", "i"),  # rows of q
    *((name, KIND) for name in KINDS),
)


@dataclass(frozen=True)
class PiecesSpec(Spec):
    """The kernel that cuts queries into pieces."""

    warps: int = 8

    arguments = CUT
    kernel = "decode.pieces.make_pieces_kernel"

    @property
    def shared_bytes(self) -> int:
        """A sum for each thread."""
        return 4 * self.threads


class Kind(NamedTuple):
    """The pieces that one launch of a decode kernel attends to.

    Attributes:
        least, most: queries of a sequence of this kind.
        size, room: queries of a piece, and pieces, at most.
    """

    least: int
    most: int
    size: int
    room: int


def kinds_of(total: int, batch: int, ratio: int, formats: Iterable[RowFormat]) -> tuple[Kind, ...]:
    """The kinds of pieces that a call may have: for single queries, for the mean number of queries,
    and for long chunks. Each size is rounded up to the queries that its columns have room for.

    A kind is left out if q has too few rows (total) for any of its sequences. ratio: query heads on
    a KV head. formats: of all rows.
    """
    formats, mean = [*formats], -(-total // batch)
    sizes = sorted({_size_of(queries, ratio, formats) for queries in (1, mean, total)})
    bounds = [0, *(size for size in sizes[:-1] if size < total)]
    kinds = []
    for i, over in enumerate(bounds):
        size, is_last = sizes[i], i == len(bounds) - 1
        room = min(batch, total // (over + 1))  # sequences, with a piece each
        if is_last:  # or several pieces each, and those of the rows after the last sequence
            room = (total + (room + 1) * (size - 1)) // size
        kinds.append(Kind(over + 1, EVERY if is_last else size, size, room))
    return tuple(kinds)


def _size_of(queries: int, ratio: int, formats: Sequence[RowFormat]) -> int:
    """Queries of a piece for so many: at most MOST_COLUMNS columns, rounded up to what fits."""
    columns, sharers = columns_of(min(queries * ratio, max(MOST_COLUMNS, ratio)), *formats)
    return max(columns * sharers // ratio, 1)


class Cut:
    """The launch that cuts queries into pieces; starts: bytes at which those of each kind begin."""

    def __init__(self, index: int, total: int, batch: int, kinds: tuple[Kind, ...]) -> None:
        rows = [0]
        for kind in kinds:
            rows.append(rows[-1] + kind.room + 1)
        self.starts = tuple(PIECE_BYTES * row for row in rows[:-1])
        self._rows = rows[-1]
        key = PiecesSpec, index, total, batch, kinds
        self._launch = cached_launch(key, None, _prepare, index, total, batch, kinds, rows)

    def __call__(self, q_indptr: torch.Tensor) -> torch.Tensor:
        """The pieces of all kinds, as CUT has them, on the current stream."""
        pieces = torch.empty(self._rows, WORDS, dtype=torch.int32, device=q_indptr.device)
        if self._launch is not None:
            self._launch((q_indptr.contiguous(), pieces))
        return pieces


def _prepare(
    index: int, total: int, batch: int, kinds: Sequence[Kind], rows: Sequence[int]
) -> Launch:
    constants = {"batch": batch, "total": total}
    for i, name in enumerate(KINDS):
        chosen = min(i, len(kinds) - 1)  # a missing kind has no block: any values will do
        values = {**kinds[chosen]._asdict(), "row": rows[chosen]}
        constants |= {f"{name}.{field}": value for field, value in values.items()}
    return Launch(PiecesSpec(), index, (len(kinds), 1, 1), constants)
