"""Causal attention of many queries to keys and values in 16 or 32 bit, without a mask in memory.

    keys      ├──────────── past ────────────┼──── own ────┤     q_len of them
    query 0   sees the past and its own token
    query n   n tokens more

cuDNN's kernel, the fastest on CUDA, masks squares only. So the past and the own tokens are attended
to apart and merged by their log-sum-exps. Gradients and sliding windows go by blocks of BLOCK
queries, each with the keys that it sees; a soft cap or ALiBi by smaller blocks, whose SCORES fit in
memory. Sink logits are a factor on the results.

Source: FlashAttention (https://arxiv.org/abs/2307.08691) by cuDNN or torch's kernels; cascade
inference (https://flashinfer.ai/2024/02/02/cascade-inference.html).
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

from ..errors import UnsupportedError
from ..rows.variant import PLAIN, AttentionVariant, add_sinks, names_of

BLOCK = 512  # queries
SCORES = {"cpu": 1 << 21, "cuda": 1 << 25}  # in memory at a time; on the CPU in its caches
POSSIBLE = {"alibi_slopes", "sink_logits", "soft_cap", "window"}  # of a variant


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lens: Sequence[int],
    sm_scale: float | None = None,
    variant: AttentionVariant | None = None,
) -> torch.Tensor:
    """Attend with the last tokens of each sequence, each to the tokens up to itself.

    Args:
        q: [batch, num_q_heads, q_len, head_dim]; num_q_heads is a multiple of num_kv_heads.
        k: [batch, num_kv_heads, longest or more, head_dim], the dtype of q.
        v: as k, of any head_dim.
        lens: tokens of each sequence, those of q included, so q_len or more; the first ones of k
            and v.
        sm_scale: factor on q·k; 1 / sqrt(head_dim) when None.
        variant: with a soft cap, sink logits, ALiBi or a window; None for plain attention.

    Returns:
        [batch, num_q_heads, q_len, head_dim of V], the dtype of q.

    Raises:
        UnsupportedError: the variant has other fields.

    Example:
        >>> import torch
        >>> from kvquant.ops.causal import causal_attention
        >>> k, v = torch.randn(2, 1, 2, 10, 64)
        >>> causal_attention(torch.randn(1, 4, 3, 64), k, v, [10]).shape
        torch.Size([1, 4, 3, 64])
    """
    names = set(names_of(variant))
    if others := names - POSSIBLE:
        raise UnsupportedError(f"{', '.join(sorted(others))}: not possible while a prompt is read")
    variant = variant or PLAIN
    if len(set(lens)) > 1:
        found = []
        for b, length in enumerate(lens):
            one = slice(b, b + 1)
            found.append(causal_attention(q[one], k[one], v[one], [length], sm_scale, variant))
        return torch.cat(found)
    total, q_len = lens[0], q.shape[2]
    k, v = k[:, :, :total], v[:, :, :total]
    if not q_len:
        return q.new_empty(*q.shape[:-1], v.shape[-1])
    if variant.window is not None and variant.window >= total:
        names.discard("window")  # it hides nothing
    if not names and total == q_len and _has_kernel(q, k, v):
        return scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=sm_scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    has_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if names <= {"sink_logits"} and (names or total > q_len) and q.is_cuda and not has_gradient:
        found_state = _causal_state(q, k, v, sm_scale)
        if found_state is not None:
            out, lse = found_state
            if variant.sink_logits is not None:
                out, lse = (x.transpose(1, 2) for x in (out, lse))  # heads behind queries
                out = add_sinks(out, lse, variant.sink_logits)[0].transpose(1, 2)
            return out.to(q.dtype)
    return _by_blocks(q, k, v, sm_scale, variant, with_scores=bool(names - {"window"}))


def _by_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sm_scale: float | None,
    variant: AttentionVariant,
    *,
    with_scores: bool,
) -> torch.Tensor:
    """Attend with blocks of queries, each to the keys that it sees, by a mask or by all scores."""
    total, q_len, rows = k.shape[2], q.shape[2], BLOCK
    window = total if variant.window is None else variant.window
    if with_scores:
        keys = min(total, window + BLOCK)
        room = SCORES["cuda" if q.is_cuda else "cpu"]
        rows = max(min(room // (q.shape[0] * q.shape[1] * keys), BLOCK), 1)
    blocks = []
    for begin in range(0, q_len, rows):
        block = q[:, :, begin : begin + rows]
        first = total - q_len + begin  # the position of its first query
        end = first + block.shape[2]
        start = max(first - window + 1, 0)
        at = torch.arange(first, end, device=q.device)[:, None]
        distance = torch.arange(start, end, device=q.device) - at
        mask = (distance <= 0) & (distance > -window)
        seen = k[:, :, start:end], v[:, :, start:end]
        if with_scores:
            out = _with_scores(block, *seen, mask, distance, sm_scale, variant)
        else:
            is_grouped = q.shape[1] != k.shape[1]
            out = scaled_dot_product_attention(
                block, *seen, attn_mask=mask, scale=sm_scale, enable_gqa=is_grouped
            )
        blocks.append(out)
    return torch.cat(blocks, dim=2)


def _with_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    distance: torch.Tensor,
    sm_scale: float | None,
    variant: AttentionVariant,
) -> torch.Tensor:
    """Attend by all scores, in float32 from products that CUDA rounds as eager attention does.

    mask and distance (key's position less the query's) are [q_len, keys].
    """
    heads, rows, dtype = k.shape[1], q.shape[2], q.dtype
    if not q.is_cuda:  # few processors multiply 16-bit numbers
        q, k, v = q.float(), k.float(), v.float()
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    # the query heads of a KV head are more rows, so that its keys are not copied
    by_kv_head = q.unflatten(1, (heads, -1))
    scores = (by_kv_head.flatten(2, 3) @ k.mT).float().view(*by_kv_head.shape[:-1], -1) * scale
    if variant.soft_cap is not None:
        scores = variant.soft_cap * (scores / variant.soft_cap).tanh()
    if variant.alibi_slopes is not None:
        scores = scores + variant.alibi_slopes.view(heads, -1, 1, 1) * distance
    scores = scores.masked_fill(~mask, -torch.inf)
    if variant.sink_logits is not None:
        sinks = variant.sink_logits.view(heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[2]].to(v.dtype)
    out: torch.Tensor = (weights.flatten(2, 3) @ v).unflatten(2, (-1, rows)).flatten(1, 2)
    return out.to(dtype)


def _causal_state(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Out and lse of the last tokens over themselves and the past; None if torch has no kernel."""
    past = k.shape[2] - q.shape[2]
    own = _state(q, k[:, :, past:], v[:, :, past:], True, sm_scale)
    if own is None or not past:
        return own
    others = _state(q, k[:, :, :past], v[:, :, :past], False, sm_scale)
    if others is None:
        return None
    share = torch.sigmoid(others[1] - own[1])[..., None]
    out = own[0].float().lerp_(others[0].float(), share)
    return out, torch.logaddexp(own[1], others[1])


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
    """Out and lse [batch, num_q_heads, q_len] by private kernels of torch; None if none can."""
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
