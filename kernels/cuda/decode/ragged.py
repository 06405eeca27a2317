"""Ragged queries on CUDA: pieces, which the decode kernel takes for sequences.

    q_indptr ─▶ pieces.py: one launch ─▶ pieces [count, 4] ─▶ the decode kernel (positions.py)

A piece is up to `most` consecutive queries of a sequence: the last queries of that sequence without
the tokens of the queries behind them. q, out and lse stay where they are, nothing is padded. The
host knows the rows of q and the batch alone. So it makes as many pieces as there may be; those that
are left over have no queries. With pieces of `most` queries, the first piece of sequence s is

    (q_indptr[s] + s * (most - 1)) // most

which leaves room for all pieces of those before it, whatever their numbers of queries are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from kvquant.rows.format import RowFormat

from ..runtime.launch import Launch, cached_launch
from ..runtime.spec import Spec, Table
from .spec import columns_of

# columns of a piece, unless one query has more: with fewer the rows of a long prompt are read more
# often, with more the warps of a single query idle. Chosen without a GPU, not measured
MOST_COLUMNS = 64
WORDS = 4  # of a piece: its sequence, its first row of q, its queries, those behind them
CUT: Table = (
    ("q_indptr", "P"),  # [batch + 1], int32
    ("pieces", "P"),  # [count, WORDS], int32
    ("batch", "i"),
    ("total", "i"),  # rows of q
    ("most", "i"),  # queries of a piece
    ("count", "i"),  # of pieces
)


@dataclass(frozen=True)
class PiecesSpec(Spec):
    """The kernel that cuts queries into pieces."""

    warps: int = 4

    arguments = CUT
    kernel = "decode.pieces.make_pieces_kernel"


def size_of_pieces(total: int, batch: int, ratio: int, formats: Iterable[RowFormat]) -> int:
    """Queries of a piece at most: the mean of all sequences, and as many more as its warps take.

    Args:
        total: rows of q.
        batch: sequences.
        ratio: query heads on a KV head.
        formats: of all rows.
    """
    mean = -(-total // batch)
    columns, sharers = columns_of(min(mean * ratio, max(MOST_COLUMNS, ratio)), *formats)
    return max(columns * sharers // ratio, 1)


def count_of_pieces(total: int, batch: int, most: int) -> int:
    """Pieces that there may be, with those of the rows behind the last sequence's."""
    return (total + (batch + 1) * (most - 1)) // most


class Cut:
    """Queries of one shape are cut into pieces."""

    def __init__(self, index: int, total: int, batch: int, most: int, count: int) -> None:
        self._count = count
        key = PiecesSpec, index, total, batch, most
        self._launch = cached_launch(key, None, _prepare, index, total, batch, most, count)

    def __call__(self, q_indptr: torch.Tensor) -> torch.Tensor:
        """The pieces, [count, WORDS] int32, on the current stream."""
        pieces = torch.empty(self._count, WORDS, dtype=torch.int32, device=q_indptr.device)
        if self._launch is not None:
            self._launch((q_indptr.contiguous(), pieces))
        return pieces


def _prepare(index: int, total: int, batch: int, most: int, count: int) -> Launch:
    constants = {"batch": batch, "total": total, "most": most, "count": count}
    spec = PiecesSpec()
    return Launch(spec, index, (-(-count // spec.threads), 1, 1), constants)
