"""Rotations of rows, in plain torch, on any device: Hadamard, and rotary embeddings (RoPE).

    rotate(x) = H x,   H = the Sylvester matrix of b / sqrt(b) in every block of b elements,
                       b = the largest power of two that divides head_dim (128 -> 128, 80 -> 16)

H is symmetric and orthonormal: rotate undoes itself, and q·k = rotate(q)·rotate(k). It spreads an
outlier channel over its block, so that the channel no longer sets the scale of a group.
The contract, which kernels repeat bit for bit, all in float32: butterflies of stride 1, 2, 4, ...,
b / 2, each of which puts the sum of two elements at the lower place and lower - upper at the upper
one; at last one product with 1 / sqrt(b) rounded to float32.

RoPE rotates pairs by the position of their token: x1 cos - x2 sin, x2 cos + x1 sin.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from .arguments import FLOATS, check_tensor


def block_size(head_dim: int) -> int:
    """Elements that are rotated together: the largest power of two that divides head_dim."""
    return head_dim & -head_dim


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotate the last axis of x in float32, rounded once to its dtype; ConfigError for others.

    Source: QuaRot's rotations (https://arxiv.org/abs/2404.00456), in blocks.
    """
    check_tensor("x", x, FLOATS)
    size, stride = block_size(x.shape[-1]), 1
    # [head_dim, ...]: then neighbours in memory do the same
    rotated = x.float().movedim(-1, 0).clone(memory_format=torch.contiguous_format)
    while stride < size:
        pairs = rotated.unflatten(0, (-1, 2, stride))
        lower, upper = pairs[:, 0], pairs[:, 1]
        difference = lower - upper
        lower += upper
        upper.copy_(difference)
        stride *= 2
    return (rotated * (1 / math.sqrt(size))).movedim(0, -1).contiguous().to(x.dtype)


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
