"""Ragged queries on CUDA: pieces, which the decode kernel takes for sequences.

    q_indptr ─▶ pieces.py: one launch ─▶ pieces of 1 or 2 queries ─▶ a decode kernel (positions.py)
                                       ─▶ pieces of up to 16       ─▶ another one, behind it

A piece is up to `size` consecutive queries of a sequence: the last queries of that sequence without
the tokens of the queries behind them. q, out and lse stay where they are, nothing is padded.

One call may have decode steps and long chunks of prompts. A kernel for few columns is fastest for a
single query, one for many columns reads the rows of a chunk least often. The host knows the rows of
q and the batch alone, so it launches a decode kernel for each kind of pieces that there may be, one
behind another. Every sequence belongs to one kind, by its number of queries, and each launch writes
the rows of its own sequences only. Pieces of a kind lie without gaps, and its launch finds on the
device how many there are: blocks beyond the last one end at once, and all of them if there is none.
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
MOST_KINDS = 3  # small ones, those of the mean, large ones
KIND: Table = (
    ("least", "i"),  # queries of a sequence
    ("most", "i"),
    ("size", "i"),  # queries of a piece
    ("room", "i"),  # pieces that there may be
    ("row", "i"),  # of `pieces`, where they begin
)
CUT: Table = (
    ("q_indptr", "P"),  # [batch + 1], int32
    # [rows, WORDS], int32: of each kind room for its pieces, and behind that the number of those
    # that were made
    ("pieces", "P"),
    ("batch", "i"),
    ("total", "i"),  # rows of q
    ("one", KIND),
    ("two", KIND),
    ("three", KIND),
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
    """Pieces that one launch of a decode kernel attends to.

    Attributes:
        least, most: queries of the sequences that are cut into them.
        size: queries of a piece, at most.
        room: pieces that there may be.
    """

    least: int
    most: int
    size: int
    room: int


def kinds_of(total: int, batch: int, ratio: int, formats: Iterable[RowFormat]) -> tuple[Kind, ...]:
    """The kinds of pieces that a call may have, by their size: of single queries, of the mean of
    all sequences, and of long chunks, each with as many more queries as its warps take.

    That of the mean is for sequences with about as many queries each, as of drafted tokens. A
    kind that no sequence can have, because q has too few rows, is left out. All others are
    launched: sequences may have no queries, so the mean does not tell that all have about as many.

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
        if is_last:  # or several, and those of the rows behind the last sequence
            room = (total + (room + 1) * (size - 1)) // size
        kinds.append(Kind(over + 1, EVERY if is_last else size, size, room))
    return tuple(kinds)


def _size_of(queries: int, ratio: int, formats: Sequence[RowFormat]) -> int:
    """Queries of a piece that has so many, and as many more as its warps take."""
    columns, sharers = columns_of(min(queries * ratio, max(MOST_COLUMNS, ratio)), *formats)
    return max(columns * sharers // ratio, 1)


class Cut:
    """Queries of one shape are cut into pieces.

    Attributes:
        starts: bytes of the pieces before those of each kind.
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
    for i, (name, _) in enumerate(CUT[-MOST_KINDS:]):
        chosen = min(i, len(kinds) - 1)  # of one that is not there any will do: it has no block
        values = {**kinds[chosen]._asdict(), "row": rows[chosen]}
        constants |= {f"{name}.{field}": value for field, value in values.items()}
    return Launch(PiecesSpec(), index, (len(kinds), 1, 1), constants)
