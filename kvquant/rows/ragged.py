"""Ragged queries in pieces, which kernels for padded queries take.

A piece is some consecutive queries of one sequence. It attends as the last queries of a shorter
sequence, because it does not see the tokens of later queries.

    5 queries, the last tokens of 9    0 1 2 3 4    pieces of 2: 2 of 6 tokens, 2 of 8, 1 of 9
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from .call import AttentionCall
from .segment import Numbers, Segment, rows_before

State = tuple[torch.Tensor, torch.Tensor]


class Pieces(NamedTuple):
    """Pieces, int64 each: sequence, first row of q, queries, and the sequence's queries after."""

    sequences: Numbers
    firsts: Numbers
    counts: Numbers
    behind: Numbers


def pieces_of(starts: Numbers, most: int) -> Pieces:
    """Cut queries into pieces of at most `most`; starts is q_indptr on the host."""
    starts = starts.astype(np.int64)
    numbers = -(-np.diff(starts) // most)
    sequences = np.arange(len(numbers)).repeat(numbers)
    place = np.arange(len(sequences)) - (numbers.cumsum() - numbers)[sequences]
    firsts = starts[sequences] + place * most
    left = starts[sequences + 1] - firsts
    counts = left.clip(max=most)
    return Pieces(sequences, firsts, counts, left - counts)


def attend_to_pieces(
    call: AttentionCall,
    most: int,
    attend: Callable[[AttentionCall], State],
    dtype: torch.dtype = torch.float32,
) -> State:
    """Attend with ragged queries by padded calls, one for each length of piece.

    out [total, num_q_heads, head_dim of V] and lse [total, num_q_heads] are of `dtype`; rows after
    the last sequence's are 0 and -inf.
    """
    q, segments, variant = call.q, call.segments, call.variant
    assert call.q_indptr is not None
    out = q.new_zeros(*q.shape[:-1], segments[0].v_format.head_dim, dtype=dtype)
    lse = q.new_full(q.shape[:-1], -torch.inf, dtype=dtype)
    pieces = pieces_of(call.q_indptr.cpu().numpy(), most)
    for count in np.unique(pieces.counts).tolist():
        alike = pieces.counts == count
        sequences, firsts, _, behind = (torch.from_numpy(x[alike]).to(q.device) for x in pieces)
        rows = firsts[:, None] + torch.arange(count, device=q.device)
        own = variant
        if own is not None and own.score_offsets is not None:
            own = own._replace(score_offsets=own.score_offsets[rows])
        shorter = _without_last(segments, sequences, behind)
        padded = call._replace(q=q[rows], segments=shorter, variant=own, q_indptr=None)
        out[rows], lse[rows] = attend(padded)
    return out, lse


def _without_last(
    segments: Sequence[Segment], sequences: torch.Tensor, behind: torch.Tensor
) -> list[Segment]:
    """Some sequences of segments, each without so many of its last tokens; both [any], int64."""

    def chosen(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x[sequences]

    made = []
    for segment in segments:
        seq_slots = segment.seq_slots
        if segment.block_table is None:
            seq_slots = sequences.int() if seq_slots is None else seq_slots[sequences]
        made.append(
            segment._replace(
                seq_lens=segment.seq_lens[sequences],
                starts=chosen(segment.starts),
                block_table=chosen(segment.block_table),
                seq_slots=seq_slots,
            )
        )
    ends = torch.stack([one.seq_lens for one in made]).sum(0) - behind
    lens = rows_before(made, ends[:, None])[..., 0].int()
    return [one._replace(seq_lens=own) for one, own in zip(made, lens, strict=True)]
