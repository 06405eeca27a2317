"""Attention variants with every field, and the formulas of them written by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvquant import AttentionVariant
from kvquant.rows.variant import PLAIN

FIELDS = AttentionVariant._fields


def variant_with(
    names: Sequence[str], batch: int, q_len: int, num_q_heads: int
) -> AttentionVariant:
    """Values of some fields, for q of four axes; some heads without a sink."""
    sinks = torch.randn(num_q_heads)
    sinks[-1] = -torch.inf
    tree = torch.rand(batch, q_len, q_len) < 0.5
    whole = AttentionVariant(
        soft_cap=1.5,
        sink_logits=sinks,
        alibi_slopes=-torch.rand(num_q_heads) / 4,
        window=7,
        tree_mask=tree | torch.eye(q_len, dtype=torch.bool),
        score_offsets=torch.randn(batch, q_len, num_q_heads),
    )
    return AttentionVariant(**{name: getattr(whole, name) for name in names})


def by_hand(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    counts: Sequence[int],
    q_lens: Sequence[int],
    variant: AttentionVariant = PLAIN,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention query by query, in float64: out and lse.

    Args:
        q: [batch, q_len, num_q_heads, head_dim].
        k, v: [batch, num_kv_heads, tokens, head_dim], in the order of the tokens.
        counts: tokens of each sequence.
        q_lens: queries of each sequence.
        variant: of attention.
        scale: of scores; 1 / sqrt(head_dim) when None.
    """
    (batch, q_len, num_q_heads, dim), kv_heads = q.shape, k.shape[1]
    k, v = k.double(), v.double()
    out = torch.zeros(batch, q_len, num_q_heads, v.shape[-1], dtype=torch.float64)
    lse = torch.full((batch, q_len, num_q_heads), -torch.inf, dtype=torch.float64)
    cap, sinks, slopes, window, tree, offsets = variant
    for b, count in enumerate(counts):
        token, first = torch.arange(count), count - q_lens[b]  # the first one that has a query
        keys, values = k[b, :, :count], v[b, :, :count]
        for i in range(q_lens[b]):
            seen = token <= first + i
            if tree is not None and first + i >= 0:
                seen = (token < first) | tree[b, i][(token - first).clamp(min=0)]
            if window is not None:
                seen = seen & (token > first + i - window)
            if not seen.any():
                continue
            queries = q[b, i].double().unflatten(0, (kv_heads, -1))
            scores = torch.einsum("htd,hrd->hrt", keys[:, seen], queries).flatten(0, 1)
            scores *= dim**-0.5 if scale is None else scale
            scores = scores if offsets is None else scores + offsets[b, i][:, None]
            scores = scores if cap is None else cap * torch.tanh(scores / cap)
            behind = token[seen] - first - i
            scores = scores if slopes is None else scores + slopes[:, None].double() * behind
            of_sinks = scores[:, :0] if sinks is None else sinks[:, None].double()
            logits = torch.cat([scores, of_sinks], 1)
            lse[b, i] = logits.logsumexp(1)
            weights = logits.softmax(1)[:, : len(behind)].unflatten(0, (kv_heads, -1))
            out[b, i] = torch.einsum("hrt,htd->hrd", weights, values[:, seen]).flatten(0, 1)
    return out, lse
