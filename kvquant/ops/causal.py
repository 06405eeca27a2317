"""Causal attention of many queries to keys and values in 16 or 32 bit, without a mask in memory.

    keys      ├──────────── past ────────────┼──── own ────┤     q_len of them
    query 0   sees the past and its own token
    query n   n tokens more

cuDNN's kernel, the fastest of torch's on CUDA, has a causal mask for squares only. So the past,
which all queries see, and their own tokens are attended to apart and merged by their log-sum-exps.
Where no kernel of torch gives those, and for gradients, queries are taken by blocks, each with the
keys that it sees: then a mask has BLOCK rows, and so have scores that are computed in memory.

Source: FlashAttention (https://arxiv.org/abs/2307.08691), by cuDNN or torch's own kernels; merged
as in cascade inference, https://flashinfer.ai/2024/02/02/cascade-inference.html.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)
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
        lens: tokens of each sequence, those of q included, so q_len or more; the first ones of k
            and v.
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
        found = []
        for b, length in enumerate(lens):
            one = slice(b, b + 1)
            found.append(causal_attention(q[one], k[one], v[one], [length], sm_scale))
        return torch.cat(found)
    total, q_len = lens[0], q.shape[2]
    k, v = k[:, :, :total], v[:, :, :total]
    is_grouped = q.shape[1] != k.shape[1]
    if not q_len:
        return q.new_empty(*q.shape[:-1], v.shape[-1])
    if total == q_len and _has_kernel(q, k, v):
        return scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=sm_scale, enable_gqa=is_grouped
        )
    past = total - q_len
    if (
        past
        and q.is_cuda
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)))
    ):
        own = _state(q, k[:, :, past:], v[:, :, past:], True, sm_scale)
        others = _state(q, k[:, :, :past], v[:, :, :past], False, sm_scale)
        if own is not None and others is not None:
            share = torch.sigmoid(others[1] - own[1])[..., None]
            return own[0].float().lerp_(others[0].float(), share).to(q.dtype)
    blocks = []
    for begin in range(0, q_len, BLOCK):
        block = q[:, :, begin : begin + BLOCK]
        rows = block.shape[2]
        seen = past + begin + rows
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


def _has_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether torch attends causally without all scores in memory."""
    if not q.is_cuda:
        return q.shape[-1] == v.shape[-1]
    params = SDPAParams(q, k, v, None, 0.0, True, q.shape[1] != k.shape[1])
    can_use = can_use_cudnn_attention, can_use_flash_attention, can_use_efficient_attention
    return any(one(params) for one in can_use)


def _state(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, sm_scale: float | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Out and lse [batch, num_q_heads, q_len] by cuDNN or torch's flash kernel, if one of them can:
    torch keeps lse for gradients, and has no public call that gives it."""
    params = SDPAParams(q, k, v, None, 0.0, is_causal, q.shape[1] != k.shape[1])
    ops = torch.ops.aten
    if can_use_cudnn_attention(params):
        out, lse, *_ = ops._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, is_causal, False, scale=sm_scale
        )
        return out, lse.view(out.shape[:-1])
    if can_use_flash_attention(params):
        out, lse, *_ = ops._scaled_dot_product_flash_attention(
            q, k, v, 0.0, is_causal, False, scale=sm_scale
        )
        return out, lse
    return None
