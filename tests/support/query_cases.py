"""What several queries a sequence are to give: the reference on one query at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvquant.rows.reference import reference_over_segments
from kvquant.rows.segment import Segment
from kvquant.rows.variant import AttentionVariant


def cut(lens: Sequence[int], segments: Sequence[Segment], hidden: int) -> list[int]:
    """Rows of each segment that stay when the last tokens are hidden: the order of tokens is that
    of the segments, but that the sinks of a ring come before all others."""
    sinks = [min(n, one.sinks) for n, one in zip(lens, segments, strict=True)]
    others = [n - first for n, first in zip(lens, sinks, strict=True)]
    for counts in (others, sinks):
        for i in reversed(range(len(lens))):
            taken = min(hidden, counts[i])
            counts[i] -= taken
            hidden -= taken
    return [first + other for first, other in zip(sinks, others, strict=True)]


def reference_of_queries(
    q: torch.Tensor, segments: Sequence[Segment], q_lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the tokens that each query sees.

    Args:
        q: [batch, q_len, num_q_heads, head_dim]; padding may hold NaN.
        segments: at most one with sinks.
        q_lens: [batch]: queries of each sequence.

    Returns:
        out [batch, q_len, num_q_heads, head_dim of V] and lse [batch, q_len, num_q_heads], float64.
    """
    numbers = q_lens.tolist()
    all_lens = list(zip(*(one.seq_lens.tolist() for one in segments), strict=True))
    outs, lses = [], []
    for i in range(q.shape[1]):
        seen = [
            cut(lens, segments, number - 1 - i) if i < number else [0] * len(segments)
            for lens, number in zip(all_lens, numbers, strict=True)
        ]
        cut_segments = [
            one._replace(seq_lens=one.seq_lens.new_tensor(lens))
            for one, lens in zip(segments, zip(*seen, strict=True), strict=True)
        ]
        of_query = torch.where(i < q_lens[:, None, None], q[:, i], 0)
        out, lse = reference_over_segments(of_query, cut_segments)
        outs.append(out)
        lses.append(lse)
    return torch.stack(outs, 1), torch.stack(lses, 1)


def make_variant(
    fields: Mapping[str, Any],
    q: torch.Tensor,
    segments: Sequence[Segment],
    q_lens: torch.Tensor | None = None,
) -> AttentionVariant:
    """A variant with random tensors; what belongs to no query and no token is NaN.

    Args:
        fields: names, each with its value or, of a tensor, anything.
        q: [batch, num_q_heads, head_dim] or [batch, q_len, num_q_heads, head_dim].
        segments: their lengths are read.
        q_lens: [batch]: queries of each sequence.
    """
    made: dict[str, Any] = {}
    batch, heads = len(segments[0].seq_lens), q.shape[-2]
    random = {
        "sink_logits": 2 * torch.randn(heads),
        "alibi_slopes": 0.2 * torch.rand(heads),
        "score_offsets": 2 * torch.randn(q.shape[:-1]),
    }
    if "tree_mask" in fields:
        q_len = q.shape[1]
        random["tree_mask"] = (torch.rand(batch, q_len, q_len) < 0.4) | torch.eye(q_len).bool()
    for name, value in fields.items():
        made[name] = random[name].to(q.device) if name in random else value
    if "score_offsets" in made and q_lens is not None:
        rows = torch.arange(q.shape[1], device=q.device) >= q_lens[:, None]
        made["score_offsets"][rows] = torch.nan
    return AttentionVariant(**made)
