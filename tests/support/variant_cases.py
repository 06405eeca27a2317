"""Attention variants with every field, and the formulas of them written by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvquant import AttentionVariant

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
    variant: AttentionVariant,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention score by score, in float64.

    Args:
        q: [batch, q_len, num_q_heads, head_dim].
        k, v: [batch, num_kv_heads, tokens, head_dim], in the order of the tokens.
        counts: tokens of each sequence.
        q_lens: queries of each sequence.
        variant: of attention.
    """
    batch, q_len, num_q_heads, dim = q.shape
    out = torch.zeros(batch, q_len, num_q_heads, v.shape[-1], dtype=torch.float64)
    lse = torch.full((batch, q_len, num_q_heads), -torch.inf, dtype=torch.float64)
    cap, sinks, slopes, window, tree, offsets = variant
    for b, count in enumerate(counts):
        for i in range(q_lens[b]):
            first = count - q_lens[b]  # of the tokens that have queries
            seen = [t for t in range(count) if t <= first + i]
            if tree is not None and first + i >= 0:
                seen = [t for t in range(count) if t < first or tree[b, i, t - first]]
            if window is not None:
                seen = [t for t in seen if t > first + i - window]
            for h in range(num_q_heads if seen else 0):
                kv_head, scores = h * k.shape[1] // num_q_heads, []
                for t in seen:
                    score = q[b, i, h].double() @ k[b, kv_head, t].double() / dim**0.5
                    score = score if offsets is None else score + offsets[b, i, h]
                    score = score if cap is None else cap * torch.tanh(score / cap)
                    score = score if slopes is None else score + slopes[h] * (t - first - i)
                    scores.append(score)
                of_sink = [] if sinks is None else [sinks[h].double()]
                logits = torch.stack(scores + of_sink)
                lse[b, i, h] = logits.logsumexp(0)
                out[b, i, h] = logits.softmax(0)[: len(seen)] @ v[b, kv_head, seen].double()
    return out, lse
