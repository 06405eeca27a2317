"""Attention as custom ops of torch, which torch.compile(fullgraph=True) takes.

    torch.ops.kvquant.decode_attention    over one segment
    torch.ops.kvquant.attend_segments     over several: lists with an entry for each

decode_attention and KVCache.attend call them inside torch.compile only, because the dispatcher
takes a few microseconds. They return [out], or [out, lse]. Formats are names; K has the head_dim of
q, V its own. Shapes and dtypes are checked while a graph is traced, everything where it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..rows.format import RowFormat
from ..rows.segment import Segment, check_segments
from .attention_backends import attend
from .dispatch import torch_op

OPTIONS = "int v_head_dim, float? sm_scale, bool return_lse, SymInt? num_splits, str? backend"
DECODE_ATTENTION = (
    "(Tensor q, Tensor k_rows, Tensor v_rows, Tensor seq_lens, str k_format, str v_format, "
    f"Tensor? starts, Tensor? block_table, {OPTIONS}) -> Tensor[]"
)
ATTEND_SEGMENTS = (
    "(Tensor q, Tensor[] k_rows, Tensor[] v_rows, Tensor[] seq_lens, str[] k_formats, "
    "str[] v_formats, Tensor?[] starts, Tensor?[] block_tables, int[] sinks, Tensor?[] seq_slots, "
    f"{OPTIONS}) -> Tensor[]"
)


def one_segment(
    q: torch.Tensor,
    v_head_dim: int,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    k_format: str,
    v_format: str,
    starts: torch.Tensor | None,
    block_table: torch.Tensor | None,
    sinks: int = 0,
    seq_slots: torch.Tensor | None = None,
) -> list[Segment]:
    """The segment of an op's arguments, as a list."""
    head_dim = int(q.shape[-1])  # a number of its own while torch traces any shape
    k, v = RowFormat.parse(k_format, head_dim), RowFormat.parse(v_format, v_head_dim)
    return [Segment(k_rows, v_rows, seq_lens, k, v, starts, block_table, sinks, seq_slots)]


def _several_segments(q: torch.Tensor, v_head_dim: int, *lists: Sequence[Any]) -> list[Segment]:
    return [
        segment
        for parts in zip(*lists, strict=True)
        for segment in one_segment(q, v_head_dim, *parts)
    ]


def _register(name: str, schema: str, make_segments: Callable[..., list[Segment]]) -> Any:
    def attend_op(q: torch.Tensor, *args: Any) -> list[torch.Tensor]:
        *parts, v_head_dim, sm_scale, return_lse, num_splits, backend = args
        segments = make_segments(q, v_head_dim, *parts)
        out, lse = attend(q, segments, sm_scale, return_lse, num_splits, backend)
        return [out] if lse is None else [out, lse]

    def fake_op(q: torch.Tensor, *args: Any) -> list[torch.Tensor]:
        *parts, v_head_dim, _, return_lse, _, _ = args
        check_segments(q, make_segments(q, v_head_dim, *parts))
        batch, num_q_heads, _ = q.shape
        out = q.new_empty(batch, num_q_heads, v_head_dim)
        lse = q.new_empty(batch, num_q_heads, dtype=torch.float32)
        return [out, lse] if return_lse else [out]

    return torch_op(name, schema, attend_op, fake_op)


decode_attention_op = _register("decode_attention", DECODE_ATTENTION, one_segment)
attend_segments_op = _register("attend_segments", ATTEND_SEGMENTS, _several_segments)
