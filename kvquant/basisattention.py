"""Attention to rows that are stored in a basis: the query is turned, the output turned back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .attention import State
from .basis import LayerBasis
from .segments import Segment, check_segments


def attend_in_basis(
    attend: Callable[..., torch.Tensor | State],
    q: torch.Tensor,
    segments: Sequence[Segment],
    basis: LayerBasis | None,
    seq_lens: torch.Tensor,
    *,
    sm_scale: float | None = None,
    **options: Any,
) -> torch.Tensor | State:
    """Attend as decode_attention does, to rows as a layer's basis stores them (basis.py).

    Args:
        attend: attend_segments, or what takes the same arguments and has the same meaning.
        q: [batch, num_q_heads, head_dim].
        segments: the rows.
        basis: of the rows; None if they are stored as they came.
        seq_lens: [batch or more], int32: tokens of each sequence in all segments.
        sm_scale, options: as in decode_attention.

    Returns:
        As decode_attention.
    """
    if basis is None:
        return attend(q, segments, sm_scale=sm_scale, **options)
    if not torch.compiler.is_compiling():  # then torch tells what cannot be turned
        check_segments(q, segments)
    found = attend(basis.k.turn_query(q), segments, sm_scale=sm_scale, **options)
    out, lse = found if isinstance(found, tuple) else (found, None)
    empty = seq_lens[: len(out), None] == 0  # what such places hold, NaN even, is not seen
    out = basis.v.restore(out).masked_fill(empty[:, :, None], 0)
    if lse is None:
        return out
    scale = 1 / math.sqrt(q.shape[-1]) if sm_scale is None else sm_scale
    return out, (lse + scale * basis.k.missing_score(q)).masked_fill(empty, -torch.inf)
