"""The prefix's part of attend_shared on CUDA, in place; under torch.compile as a custom op.

torch.ops.kvquant.add_prefix    writes out and lse
"""

from __future__ import annotations

import torch

from . import debug
from .layout import RowFormat
from .segments import Segment, check_segments

ADD_PREFIX = (
    "(Tensor q, Tensor k_rows, Tensor v_rows, Tensor seq_lens, str k_format, str v_format, "
    "Tensor? block_table, Tensor? members, Tensor(a!) out, Tensor(b!) lse, float sm_scale, "
    "int? num_splits) -> ()"
)


def add_prefix(
    q: torch.Tensor,
    prefix: Segment,
    members: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    sm_scale: float,
    num_splits: int | None,
) -> None:
    """Merge attention over a prefix into states, in place; see kernels/prefix.py."""
    k_rows, v_rows, seq_lens, k_format, v_format, _, table, _, _ = prefix
    if torch.compiler.is_compiling():
        add_prefix_op(
            q.detach(),
            k_rows,
            v_rows,
            seq_lens,
            str(k_format),
            str(v_format),
            table,
            members,
            out,
            lse,
            sm_scale,
            num_splits,
        )
        return
    from .kernels.prefix import add_prefix as launch

    if debug.enabled:
        debug.check_values([prefix])
    launch(q, prefix, members, out, lse, sm_scale, num_splits, lambda: check_prefix(q, prefix))


def check_prefix(q: torch.Tensor, prefix: Segment) -> None:
    """Raise unless queries can attend to a prefix of one sequence."""
    check_segments(q[:1], [prefix] if len(q) else [])


def _op(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    k_format: str,
    v_format: str,
    block_table: torch.Tensor | None,
    members: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    sm_scale: float,
    num_splits: int | None,
) -> None:
    prefix = _segment(q, k_rows, v_rows, seq_lens, k_format, v_format, block_table, out)
    add_prefix(q, prefix, members, out, lse, sm_scale, num_splits)


def _fake(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    k_format: str,
    v_format: str,
    block_table: torch.Tensor | None,
    members: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    sm_scale: float,
    num_splits: int | None,
) -> None:
    prefix = _segment(q, k_rows, v_rows, seq_lens, k_format, v_format, block_table, out)
    check_prefix(q, prefix)


def _segment(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    k_format: str,
    v_format: str,
    block_table: torch.Tensor | None,
    out: torch.Tensor,
) -> Segment:
    k = RowFormat.parse(k_format, int(q.shape[-1]))
    v = RowFormat.parse(v_format, int(out.shape[-1]))
    return Segment(k_rows, v_rows, seq_lens, k, v, None, block_table)


# the strides of rows are kept: a copy of a cache would cost more than the attention
torch.library.define("kvquant::add_prefix", ADD_PREFIX, tags=(torch.Tag.needs_fixed_stride_order,))
torch.library.impl("kvquant::add_prefix", "default", _op)
torch.library.register_fake("kvquant::add_prefix", _fake)

add_prefix_op = torch.ops.kvquant.add_prefix
