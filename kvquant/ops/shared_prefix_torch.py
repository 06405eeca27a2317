"""The prefix's part of attend_shared on CUDA, in place; under torch.compile as a custom op.

torch.ops.kvquant.add_prefix    writes out and lse
"""

from __future__ import annotations

from typing import Any

import torch

from .. import debug
from ..rows.segment import Segment, check_segment_values, check_segments
from .attention_torch import one_segment
from .dispatch import torch_op

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
    """Merge attention over a prefix into states, in place; see kernels/cuda/prefix/launch.py."""
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
    from ..kernels.cuda.prefix.launch import add_prefix as launch

    if debug.enabled:
        check_segment_values([prefix])
    launch(q, prefix, members, out, lse, sm_scale, num_splits, lambda: check_prefix(q, prefix))


def check_prefix(q: torch.Tensor, prefix: Segment) -> None:
    """Raise unless queries can attend to a prefix of one sequence."""
    if len(q):
        check_segments(q[:1], [prefix])


def _call(q: torch.Tensor, *args: Any) -> tuple[Any, ...]:
    """The arguments of add_prefix, of those of the op."""
    k_rows, v_rows, seq_lens, k_format, v_format, table, members, out, *others = args
    rows = k_rows, v_rows, seq_lens, k_format, v_format, None, table
    (prefix,) = one_segment(q, int(out.shape[-1]), *rows)
    return q, prefix, members, out, *others


def _op(*args: Any) -> None:
    add_prefix(*_call(*args))


def _fake(*args: Any) -> None:
    q, prefix, *_ = _call(*args)
    check_prefix(q, prefix)


add_prefix_op = torch_op("add_prefix", ADD_PREFIX, _op, _fake)
