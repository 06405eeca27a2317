"""Random variants of attention, for cases of kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvquant.rows.segment import Segment
from kvquant.rows.variant import AttentionVariant


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
