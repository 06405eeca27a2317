"""What happens to rows before they are quantized: RoPE, an offset, a rotation, a matrix.

    x <- RoPE(x)          x1 * cos - x2 * sin,  x2 * cos + x1 * sin    (K only)
    x <- x - offset       per KV head and channel
    x <- rotate(x)        rotation.py
    x <- x @ matrix       per KV head

In float32, in this order; every product, sum and difference is rounded by itself (kernels fuse no
multiply-add), so that all of them give the same bits. Only those of the product with the matrix
differ in the last places: torch's may depend on how many rows there are; on CUDA 16-bit rows
without RoPE and rotation are multiplied by kernels/cuda/affine/launch.py, where they do not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .quantize import full_precision
from .rotation import rotate


class RowTransform(NamedTuple):
    """What is done to the rows of K or of V before they are stored, and how they are rounded.

    Attributes:
        offset: [num_kv_heads, head_dim], float32, subtracted; None for none.
        rotate: whether rows are then rotated (rotation.rotate).
        matrix: [num_kv_heads, head_dim, head_dim], float32, with which rows are then multiplied
            from the right; None for none.
        clip: [num_kv_heads], float32: see quantize_calibrated.
        feedback: [num_kv_heads, head_dim, head_dim], float32: likewise.
    """

    offset: torch.Tensor | None = None
    rotate: bool = False
    matrix: torch.Tensor | None = None
    clip: torch.Tensor | None = None
    feedback: torch.Tensor | None = None


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
    """Do to rows of K or V what is asked for, as the module tells; they are not rounded.

    Args:
        x: [num_tokens, num_kv_heads, head_dim], float32, bfloat16 or float16.
        transform, rope: None for nothing.

    Returns:
        The same shape, float32; x itself if nothing is asked for.
    """
    if rope is not None:
        x = apply_rope(x, rope)
    if transform is None:
        return x
    if transform.offset is not None:
        x = x.float() - transform.offset
    if transform.rotate:
        x = rotate(x.float())
    if transform.matrix is not None:
        with full_precision(x):
            x = (x.float().transpose(0, 1) @ transform.matrix).transpose(0, 1)
    return x
