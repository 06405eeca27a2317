"""Ragged queries on CUDA: pieces, which the decode kernel takes for sequences.

    q_indptr ─▶ pieces.py: one launch ─▶ pieces of 1 or 2 queries ─▶ a decode kernel (positions.py)
                                      ─▶ pieces of up to 16       ─▶ then another decode kernel

A piece is up to `size` consecutive queries of a sequence. Without the tokens of the queries behind
the piece they are the last queries of that sequence. q, out and lse stay where they are, without
padding.

One call may have decode steps and long chunks of prompts. A kernel for few columns is fastest for a
single query. A kernel for many columns reads the rows of a chunk least often. So there are kinds of
pieces, and a sequence belongs to one of them by its number of queries. The host knows only how many
rows q has and how many sequences there are. So it launches a decode kernel for each kind that may
occur, one launch after another, and each launch writes the rows of its own sequences.

The pieces of a kind stand in memory without gaps. The decode kernel loads their number on the
device, and blocks beyond the last piece end at once.
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
WORDS = 4  # of a piece: its sequence, its first row of q, its queries, those behind them
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
        least, most: how many queries a sequence of this kind has.
        size: queries of a piece, at most.
        room: pieces, at most.
    """

    least: int
    most: int
    size: int
    room: int


def kinds_of(total: int, batch: int, ratio: int, formats: Iterable[RowFormat]) -> tuple[Kind, ...]:
    """The kinds of pieces that a call may have, by their size: for single queries, for the mean
    number of queries of a sequence, and for long chunks. Each size is rounded up to the queries
    that the columns of its warps have room for.

    The kind of the mean is for sequences with about equally many queries, drafted tokens for
    example. A kind is left out if q has too few rows for any sequence of that kind. All others
    are launched: some sequences may have no queries, so the mean does not rule out any of them.

    Args:
        total: rows of q.
        batch: sequences.
        ratio: query heads on a KV head.
        formats: of all rows.
    """
    formats, mean = [*formats], -(-total // batch)
    sizes = sorted({_size_of(queries, ratio, formats) for queries in (1, mean, total)})
    bounds = [0, *(size for size in sizes[:-1] if size < total)]
    kinds = []
    for i, over in enumerate(bounds):
        size, is_last = sizes[i], i == len(bounds) - 1
        room = min(batch, total // (over + 1))  # sequences, with a piece each
        if is_last:  # or several pieces each, and those of the rows behind the last sequence
            room = (total + (room + 1) * (size - 1)) // size
        kinds.append(Kind(over + 1, EVERY if is_last else size, size, room))
    return tuple(kinds)


def _size_of(queries: int, ratio: int, formats: Sequence[RowFormat]) -> int:
    """Queries of a piece that is for so many: with at most MOST_COLUMNS columns, or one query, and
    rounded up to the columns that its warps have."""
    columns, sharers = columns_of(min(queries * ratio, max(MOST_COLUMNS, ratio)), *formats)
    return max(columns * sharers // ratio, 1)


class Cut:
    """The launch that cuts queries of one shape into pieces.

    Attributes:
        starts: where the pieces of each kind begin, in bytes.
    """

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
