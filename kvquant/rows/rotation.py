"""Rotary embeddings (RoPE) of new rows, in plain torch, on any device.

Pairs are rotated by the position of their token: x1 cos - x2 sin, x2 cos + x1 sin.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Rope(NamedTuple):
    """The rotary embedding of new keys.

    Attributes:
        cos: [num_tokens, rotary_dim / 2], float32, rows contiguous; rotary_dim is at most head_dim,
            and the elements after it pass.
        sin: the same of the sines.
        interleaved: whether x1 and x2 are the even and the odd elements (GPT-J), and not the first
            and the second half (GPT-NeoX, Llama).
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False


def apply_rope(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Apply RoPE (https://arxiv.org/abs/2104.09864) to the first rotary_dim elements; float32."""
    cos, sin = rope.cos[:, None], rope.sin[:, None]
    half = cos.shape[-1]
    rotated, rest = x.float().split([2 * half, x.shape[-1] - 2 * half], dim=-1)
    pairs = rotated.unflatten(-1, (half, 2) if rope.interleaved else (2, half))
    x1, x2 = pairs.unbind(-1 if rope.interleaved else -2)
    parts = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    rotated = torch.stack(parts, dim=-1 if rope.interleaved else -2).flatten(-2)
    return torch.cat([rotated, rest], dim=-1)
