"""Causal attention of many queries to keys and values in 16 or 32 bit, without a mask in memory.

    keys      ├──────────── past ────────────┼──── new ────┤
    query 0   sees the past and its own token               query n - 1 sees all

On CUDA in 16 bit it is FlashAttention, its mask aligned to the lower right. Elsewhere torch has no
such kernel: there queries are taken by blocks, each with the keys that it sees, so that a mask has
BLOCK rows.

Source: torch.nn.attention.bias.causal_lower_right; FlashAttention-2,
https://arxiv.org/abs/2307.08691.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

BLOCK = 512  # queries


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lens: Sequence[int],
    sm_scale: float | None = None,
) -> torch.Tensor:
    """Attend with the last tokens of each sequence, each to the tokens up to itself.

    Args:
        q: [batch, num_q_heads, q_len, head_dim]; num_q_heads is a multiple of num_kv_heads.
        k: [batch, num_kv_heads, longest or more, head_dim], the dtype of q.
        v: as k, of any head_dim.
        lens: tokens of each sequence, those of q included; the first ones of k and v.
        sm_scale: factor on q·k; 1 / sqrt(head_dim) when None.

    Returns:
        [batch, num_q_heads, q_len, head_dim of V], the dtype of q.

    Example:
        >>> import torch
        >>> from kvquant.ops.causal import causal_attention
        >>> k, v = torch.randn(2, 1, 2, 10, 64)
        >>> causal_attention(torch.randn(1, 4, 3, 64), k, v, [10]).shape
        torch.Size([1, 4, 3, 64])
    """
    if len(set(lens)) > 1:
        each = [x.split(1) for x in (q, k, v)]
        found = [
            causal_attention(*one, [length], sm_scale)
            for *one, length in zip(*each, lens, strict=True)
        ]
        return torch.cat(found)
    total, q_len = lens[0], q.shape[2]
    k, v = k[:, :, :total], v[:, :, :total]
    is_grouped = q.shape[1] != k.shape[1]
    if total == q_len:
        return scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=sm_scale, enable_gqa=is_grouped
        )
    if q.is_cuda and can_use_flash_attention(SDPAParams(q, k, v, None, 0.0, True, is_grouped)):
        mask = causal_lower_right(q_len, total)
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=sm_scale, enable_gqa=is_grouped
        )
    blocks = []
    for block in q.split(BLOCK, dim=2):
        rows = block.shape[2]
        seen = total - q_len + sum(one.shape[2] for one in blocks) + rows
        mask = torch.ones(rows, seen, dtype=torch.bool, device=q.device).tril(seen - rows)
        blocks.append(
            scaled_dot_product_attention(
                block,
                k[:, :, :seen],
                v[:, :, :seen],
                attn_mask=mask,
                scale=sm_scale,
                enable_gqa=is_grouped,
            )
        )
    return torch.cat(blocks, dim=2)
