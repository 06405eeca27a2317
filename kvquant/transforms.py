"""What happens to rows before they are quantized: RoPE, then an offset, then a rotation.

    x <- RoPE(x)          x1 * cos - x2 * sin,  x2 * cos + x1 * sin    (K only)
    x <- x - offset       per KV head and channel
    x <- rotate(x)        hadamard.py

In float32, in this order; every product, sum and difference is rounded by itself (kernels fuse no
multiply-add), so that all of them give the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .hadamard import rotate


class RowTransform(NamedTuple):
    """What is done to the rows of K or of V before they are stored.

    Attributes:
        offset: [num_kv_heads, head_dim], float32, subtracted; None for none.
        rotate: whether rows are then rotated (hadamard.rotate).
    """

    offset: torch.Tensor | None = None
    rotate: bool = False


class Rope(NamedTuple):
    """The rotary embedding of new keys.

    Attributes:
        cos: [num_tokens, rotary_dim / 2], float32, rows contiguous; rotary_dim is at most head_dim,
            and the elements after it pass.
        sin: likewise.
        interleaved: whether x1 and x2 are the even and the odd elements (GPT-J), and not the first
            and the second half (GPT-NeoX, Llama).
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False


def apply_rope(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Turn the first rotary_dim elements of rows.

    Args:
        x: [num_tokens, num_kv_heads, head_dim], float32, bfloat16 or float16.
        rope: the angles of each token.

    Returns:
        The same shape, float32.

    Source: RoFormer (https://arxiv.org/abs/2104.09864).
    """
    cos, sin = rope.cos[:, None], rope.sin[:, None]
    half = cos.shape[-1]
    turned, rest = x.float().split([2 * half, x.shape[-1] - 2 * half], dim=-1)
    pairs = turned.unflatten(-1, (half, 2) if rope.interleaved else (2, half))
    x1, x2 = pairs.unbind(-1 if rope.interleaved else -2)
    parts = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    turned = torch.stack(parts, dim=-1 if rope.interleaved else -2).flatten(-2)
    return torch.cat([turned, rest], dim=-1)


def transform_rows(
    x: torch.Tensor, transform: RowTransform | None, rope: Rope | None = None
) -> torch.Tensor:
    """Do to rows of K or V what is asked for, as the module tells.

    Args:
        x: [num_tokens, num_kv_heads, head_dim], float32, bfloat16 or float16.
        transform, rope: None for nothing.

    Returns:
        The same shape, float32; x itself if nothing is asked for.
    """
    if rope is not None:
        x = apply_rope(x, rope)
    if transform is not None and transform.offset is not None:
        x = x.float() - transform.offset
    if transform is not None and transform.rotate:
        x = rotate(x.float())
    return x
