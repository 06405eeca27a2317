"""Decode attention over dequantized rows in float64: what every kernel is compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

import torch

from .arguments import check_flag, check_readable, check_scale
from .call import AttentionCall
from .format import RowFormat
from .indptr import check_indptr_values
from .ragged import attend_to_pieces
from .segment import (
    Segment,
    check_q_len_values,
    check_segment_values,
    check_segments,
    first_positions,
    parse_formats,
)
from .variant import (
    PLAIN,
    AttentionVariant,
    add_sinks,
    check_variant,
    check_variant_values,
    in_use,
)

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Unpack

    from .options import No, RowOptions, Yes

State = tuple[torch.Tensor, torch.Tensor]
LOG2E = math.log2(math.e)


@overload
def reference_attention(
    q: Tensor, k_rows: Tensor, v_rows: Tensor, seq_lens: Tensor, **options: Unpack[RowOptions[No]]
) -> Tensor: ...
@overload
def reference_attention(
    q: Tensor, k_rows: Tensor, v_rows: Tensor, seq_lens: Tensor, **options: Unpack[RowOptions[Yes]]
) -> State: ...
def reference_attention(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    k_format: str | RowFormat,
    v_format: str | RowFormat,
    block_table: torch.Tensor | None = None,
    q_lens: torch.Tensor | None = None,
    q_indptr: torch.Tensor | None = None,
    variant: AttentionVariant | None = None,
    sm_scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | State:
    """Attend as decode_attention does, in plain torch and float64, slowly.

    Args:
        q: [batch, num_q_heads, head_dim], any float dtype, or [batch, q_len, num_q_heads,
            head_dim]; with q_indptr [total, num_q_heads, head_dim].
        k_rows: [batch, num_kv_heads, capacity, row bytes of k_format], uint8; with a block_table
            [num_pages, num_kv_heads, page_size, row bytes of k_format].
        v_rows: the same for V, with the row bytes of v_format.
        seq_lens: [batch], int32: rows in use.
        k_format: format of k_rows, or its short name.
        v_format: format of v_rows, or its short name (then of the head_dim of q).
        block_table: [batch, max_pages], int32: the pages of each sequence; None: no pages.
        q_lens: [batch], int32: queries of each sequence, as in decode_attention.
        q_indptr: [batch + 1], int32: which rows of q are whose, as in decode_attention.
        variant: what the model changes in attention, see AttentionVariant; nothing when None.
        sm_scale: factor on q·k; 1 / sqrt(head_dim) when None.
        return_lse: return the log-sum-exp of the scaled scores as well.

    Returns:
        As decode_attention, in float64: out of the shape of q, but with the head_dim of v_format,
        with return_lse also lse of that shape without its last axis, base e. A query that sees no
        token gives zeros and lse -inf; a head with a score that is not finite in float32 gives NaN.

    Raises:
        ShapeError, ConfigError, DeviceError: as decode_attention.

    Example:
        >>> import torch
        >>> from kvquant import quantize_rows, reference_attention
        >>> rows = quantize_rows(torch.ones(1, 2, 10, 64), "int8")
        >>> lens = torch.tensor([10], dtype=torch.int32)
        >>> q = torch.zeros(1, 4, 64)
        >>> out = reference_attention(q, rows, rows, lens, k_format="int8", v_format="int8")
        >>> out.shape, round(float(out[0, 0, 0]), 6)
        (torch.Size([1, 4, 64]), 1.0)
    """
    check_flag("return_lse", return_lse)
    given = {"q": q, "k_rows": k_rows, "v_rows": v_rows, "seq_lens": seq_lens}
    optional = {"block_table": block_table, "q_lens": q_lens, "q_indptr": q_indptr}
    check_readable(**given, **{name: x for name, x in optional.items() if x is not None})
    rows = Segment(k_rows, v_rows, seq_lens, k_format, v_format, None, block_table)  # type: ignore[arg-type]
    segment = parse_formats(q, rows)
    check_segments(q, [segment], q_lens, q_indptr)
    check_segment_values([segment])
    if q_lens is not None:
        check_q_len_values(q, q_lens)
    if q_indptr is not None:
        check_indptr_values(q, q_indptr)
    if (variant := in_use(variant)) is not None:
        check_variant(q, variant)
        check_variant_values(q, q_lens, variant)
    scale = None if sm_scale is None else check_scale(sm_scale)
    out, lse = reference_over_segments(q.detach(), [segment], scale, q_lens, variant, q_indptr)
    return (out, lse) if return_lse else out


def reference_over_segments(
    q: torch.Tensor,
    segments: Sequence[Segment],
    sm_scale: float | None = None,
    q_lens: torch.Tensor | None = None,
    variant: AttentionVariant | None = None,
    q_indptr: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to all segments as to one sequence (see reference_attention); out and lse, float64."""
    variant = variant or PLAIN
    if q_indptr is not None:

        def attend(one: AttentionCall) -> State:
            return reference_over_segments(one.q, one.segments, sm_scale, None, one.variant)

        call = AttentionCall(q, segments, variant=variant, q_indptr=q_indptr)
        return attend_to_pieces(call, max(len(q), 1), attend, torch.float64)
    if q.ndim == 3:
        if variant.score_offsets is not None:
            variant = variant._replace(score_offsets=variant.score_offsets[:, None])
        out, lse = reference_over_segments(q[:, None], segments, sm_scale, None, variant)
        return out[:, 0], lse[:, 0]
    batch, q_len, num_q_heads, head_dim = q.shape
    num_kv_heads = segments[0].k_rows.shape[1]
    sm_scale = head_dim**-0.5 if sm_scale is None else sm_scale
    shape, v_dim = (batch, q_len, num_q_heads), segments[0].v_format.head_dim
    out = torch.zeros(*shape, v_dim, dtype=torch.float64, device=q.device)
    lse = torch.full(shape, -torch.inf, dtype=torch.float64, device=q.device)
    firsts = first_positions(segments).tolist()
    counts = [q_len] * batch if q_lens is None else q_lens.clamp(0, q_len).tolist()
    for b, count in enumerate(counts):
        pairs = [segment.dequantized(b) for segment in segments]
        k, v = (torch.cat(side, dim=1).double() for side in zip(*pairs, strict=True))
        positions = torch.cat(
            [
                torch.where(row < one.sinks, row + of_sinks[b], row + of_others[b])
                for one, of_sinks, of_others in zip(segments, *firsts, strict=True)
                for row in [torch.arange(int(one.seq_lens[b]), device=q.device)]
            ]
        )
        for i in range(count):
            at = len(positions) - count + i
            seen = _is_seen(variant, positions, b, i, at, count)
            if at < 0 or not bool(seen.any()):
                continue
            heads = q[b, i].double().view(num_kv_heads, -1, head_dim)
            scores = torch.einsum("hgd,htd->hgt", heads, k[:, seen]) * sm_scale
            # kernels compute in float32: what it cannot hold is no score
            holdable = (scores * LOG2E).float().isfinite().all(-1, keepdim=True)
            holdable &= (heads.float() * (sm_scale * LOG2E)).isfinite().all(-1, keepdim=True)
            scores = scores.masked_fill(~holdable, torch.nan).flatten(0, 1)
            scores = _changed(variant, scores, positions[seen], b, i, at)
            lse[b, i] = scores.logsumexp(-1)
            weights = scores.softmax(-1).view(num_kv_heads, -1, scores.shape[-1])
            out[b, i] = torch.einsum("hgt,htd->hgd", weights, v[:, seen]).flatten(0, 1)
    return (out, lse) if variant.sink_logits is None else add_sinks(out, lse, variant.sink_logits)


def _is_seen(
    variant: AttentionVariant, positions: torch.Tensor, b: int, i: int, at: int, count: int
) -> torch.Tensor:
    """Which of `count` tokens the query i of sequence b at position `at` sees."""
    seen = positions <= at
    if variant.tree_mask is not None:
        row = positions - (at - i)  # of the token among the queries
        seen = (row < 0) | variant.tree_mask[b, i, :count][row.clamp(min=0)]
    if variant.window is not None:
        seen &= positions > at - variant.window
    return seen


def _changed(
    variant: AttentionVariant,
    scores: torch.Tensor,
    positions: torch.Tensor,
    b: int,
    i: int,
    at: int,
) -> torch.Tensor:
    """Scores [num_q_heads, tokens] of a query, changed by the variant."""
    if variant.score_offsets is not None:
        scores = scores + variant.score_offsets[b, i, :, None]
    if variant.soft_cap is not None:
        scores = variant.soft_cap * (scores / variant.soft_cap).tanh()
    if variant.alibi_slopes is not None:
        scores = scores + variant.alibi_slopes[:, None].double() * (positions - at)
    return scores
