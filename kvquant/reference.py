"""Decode attention over dequantized rows in float64: what every kernel is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .debug import check_values
from .layout import RowFormat
from .segments import Segment, check_segments, make_segment


def reference_attention(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    k_format: str | RowFormat,
    v_format: str | RowFormat,
    block_table: torch.Tensor | None = None,
    sm_scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend as decode_attention does, in plain torch and float64, slowly.

    Args:
        q: [batch, num_q_heads, head_dim], any float dtype.
        k_rows: [batch, num_kv_heads, capacity, row bytes of k_format], uint8; with a block_table
            [num_pages, num_kv_heads, page_size, row bytes of k_format].
        v_rows: likewise, of the row bytes of v_format.
        seq_lens: [batch], int32: rows in use.
        k_format: format of k_rows, or its short name.
        v_format: format of v_rows, or its short name (then of the head_dim of q).
        block_table: [batch, max_pages], int32: the pages of each sequence; None: no pages.
        sm_scale: factor on q·k; 1 / sqrt(head_dim) when None.

    Returns:
        out [batch, num_q_heads, head_dim of v_format] and lse [batch, num_q_heads], base e, both
        float64. A sequence of length 0 gives zeros and lse -inf.

    Raises:
        ShapeError, ConfigError, DeviceError: as decode_attention.
    """
    segment = make_segment(q, k_rows, v_rows, seq_lens, k_format, v_format, block_table)
    check_segments(q, [segment])
    check_values([segment])
    return reference_over_segments(q, [segment], sm_scale)


def reference_over_segments(
    q: torch.Tensor, segments: Sequence[Segment], sm_scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the tokens of all segments as to one sequence; see reference_attention."""
    batch, num_q_heads, head_dim = q.shape
    num_kv_heads = segments[0].k_rows.shape[1]
    sm_scale = head_dim**-0.5 if sm_scale is None else sm_scale
    out = torch.zeros(
        batch, num_q_heads, segments[0].v_format.head_dim, dtype=torch.float64, device=q.device
    )
    lse = torch.full((batch, num_q_heads), -torch.inf, dtype=torch.float64, device=q.device)
    for b in range(batch):
        pairs = [segment.dequantized(b, torch.float32) for segment in segments]
        k = torch.cat([k for k, _ in pairs], dim=1).double()  # [num_kv_heads, tokens, head_dim]
        v = torch.cat([v for _, v in pairs], dim=1).double()
        if k.shape[1] == 0:
            continue
        heads = q[b].double().view(num_kv_heads, -1, head_dim)
        scores = torch.einsum("hgd,htd->hgt", heads, k) * sm_scale
        lse[b] = scores.logsumexp(-1).flatten()
        out[b] = torch.einsum("hgt,htd->hgd", scores.softmax(-1), v).flatten(0, 1)
    return out, lse
