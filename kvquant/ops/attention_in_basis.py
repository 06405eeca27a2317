"""Attention to rows that are stored in a basis: the query is turned, the output turned back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..arguments import check_scale, check_tensors
from ..rows.basis import LayerBasis
from ..rows.segment import Segment, check_segments
from .attention import State
from .transform import takes_one_launch, turn_rows

FLOAT32_MAX = torch.finfo(torch.float32).max


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
    check_tensors(q=q)
    if q.requires_grad:
        q = q.detach()
    scale = own_scale = None if sm_scale is None else check_scale(sm_scale)
    check = functools.partial(check_segments, q, segments)
    if fused := takes_one_launch(q, options.get("backend")):
        matrix = basis.k.matrix
        if q.dtype == torch.float16:  # which may not hold what the query becomes
            matrix, factor = basis.k.fp16_matrix, basis.k.fp16_factor
            scale = factor * (q.shape[-1] ** -0.5 if scale is None else scale)
        turned = q if matrix is None else turn_rows(q, matrix, check=check)
    else:
        if not torch.compiler.is_compiling():  # then torch tells what cannot be turned
            check()
        turned = basis.k.turn_query(q)
    found = attend(turned, segments, sm_scale=scale, **options)
    out, lse = found if isinstance(found, tuple) else (found, None)
    # what places without tokens hold, NaN even, is not seen
    if fused:
        out = turn_rows(out, basis.v.transposed, basis.v.offset, seq_lens)
    else:
        out = basis.v.restore(out).masked_fill(seq_lens[: len(q), None, None] == 0, 0).to(q.dtype)
    if lse is None:
        return out
    own_scale = q.shape[-1] ** -0.5 if own_scale is None else own_scale
    if abs(own_scale) > FLOAT32_MAX:  # every score is NaN, and add takes no such alpha
        own_scale = FLOAT32_MAX
    lse = lse.add(basis.k.missing_score(q), alpha=own_scale)
    return out, lse.masked_fill(seq_lens[: len(q), None] == 0, -torch.inf)
