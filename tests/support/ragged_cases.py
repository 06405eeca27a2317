"""What ragged queries are to give: the padded call of each sequence alone, by the reference."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from kvquant.rows.reference import reference_over_segments
from kvquant.rows.segment import Segment
from kvquant.rows.variant import AttentionVariant

State = tuple[torch.Tensor, torch.Tensor]


def indptr(counts: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """q_indptr of sequences with so many queries."""
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)


def only(segment: Segment, b: int) -> Segment:
    """One sequence of a segment."""
    one = slice(b, b + 1)
    starts, table, slots = segment.starts, segment.block_table, segment.seq_slots
    made = segment._replace(
        seq_lens=segment.seq_lens[one],
        starts=None if starts is None else starts[one],
        block_table=None if table is None else table[one],
        seq_slots=None if slots is None else slots[one],
    )
    if table is None and slots is None:
        made = made._replace(k_rows=segment.k_rows[one], v_rows=segment.v_rows[one])
    return made


def each_alone(
    q: torch.Tensor,
    segments: Sequence[Segment],
    counts: Sequence[int],
    variant: AttentionVariant | None = None,
) -> State:
    """Attend to each sequence with its rows of q as the only sequence, in float64.

    Args:
        q: [total, num_q_heads, head_dim]; rows behind those that counts say give 0 and -inf.
        segments: of all sequences.
        counts: queries of each.
        variant: score_offsets are [total, num_q_heads].
    """
    shape, v_dim = q.shape[:-1], segments[0].v_format.head_dim
    out = torch.zeros(*shape, v_dim, dtype=torch.float64, device=q.device)
    lse = torch.full(shape, -torch.inf, dtype=torch.float64, device=q.device)
    for b, (begin, end) in enumerate(pairwise([0, *accumulate(counts)])):
        own, rows = variant, slice(begin, end)
        if own is not None and own.score_offsets is not None:
            own = own._replace(score_offsets=own.score_offsets[None, rows])
        if end > begin:
            alone = [only(one, b) for one in segments]
            state = reference_over_segments(q[None, rows], alone, variant=own)
            out[rows], lse[rows] = (x[0] for x in state)
    return out, lse
