"""Append and dequantize as custom ops of torch, which torch.compile(fullgraph=True) takes.

    torch.ops.kvquant.append_rows         writes k_rows, v_rows, exact_k, exact_v and bad
    torch.ops.kvquant.dequantize_pages    writes out

Called inside torch.compile only, because the dispatcher takes a few microseconds. They return
nothing: what they write is declared, and torch keeps it in place. Formats are names, of the
head_dim of k, v and out. Shapes and dtypes are checked while a graph is traced, everything where it
runs.
"""

from __future__ import annotations

from typing import Any

import torch

from ..rows.format import RowFormat
from ..rows.slots import Slots
from ..rows.transforms import Rope, RowTransform
from .append_backends import append, dequantize
from .append_checks import Append, check_append, check_dequantize
from .dispatch import torch_op

APPEND_ROWS = (
    "(Tensor k, Tensor v, Tensor(a!) k_rows, Tensor(b!) v_rows, Tensor packed, Tensor? exact, "
    "Tensor? evicted, str k_format, str v_format, Tensor(c!)? exact_k, Tensor(d!)? exact_v, "
    "str exact_format, Tensor? k_offset, bool k_rotate, Tensor? k_matrix, Tensor? k_clip, "
    "Tensor? k_feedback, Tensor? v_offset, bool v_rotate, Tensor? v_matrix, Tensor? v_clip, "
    "Tensor? v_feedback, Tensor? cos, Tensor? sin, bool interleaved, Tensor(e!)? bad, "
    "str? backend) -> ()"
)
DEQUANTIZE_PAGES = "(Tensor rows, str fmt, Tensor slots, Tensor(a!) out, str? backend) -> ()"


def _call(
    k: torch.Tensor,
    v: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    packed: torch.Tensor,
    exact: torch.Tensor | None,
    evicted: torch.Tensor | None,
    k_format: str,
    v_format: str,
    exact_k: torch.Tensor | None,
    exact_v: torch.Tensor | None,
    exact_format: str,
    k_offset: torch.Tensor | None,
    k_rotate: bool,
    k_matrix: torch.Tensor | None,
    k_clip: torch.Tensor | None,
    k_feedback: torch.Tensor | None,
    v_offset: torch.Tensor | None,
    v_rotate: bool,
    v_matrix: torch.Tensor | None,
    v_clip: torch.Tensor | None,
    v_feedback: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool,
    bad: torch.Tensor | None,
) -> Append:
    return Append(
        k,
        v,
        k_rows,
        v_rows,
        Slots(packed, exact, evicted),
        RowFormat.parse(k_format, int(k.shape[-1])),
        RowFormat.parse(v_format, int(v.shape[-1])),
        exact_k,
        exact_v,
        exact_format,
        RowTransform(k_offset, k_rotate, k_matrix, k_clip, k_feedback),
        RowTransform(v_offset, v_rotate, v_matrix, v_clip, v_feedback),
        None if cos is None or sin is None else Rope(cos, sin, interleaved),
        bad,
    )


def _append(*args: Any) -> None:
    append(_call(*args[:-1]), args[-1])


def _append_fake(*args: Any) -> None:
    check_append(_call(*args[:-1]))


def _dequantize(
    rows: torch.Tensor, fmt: str, slots: torch.Tensor, out: torch.Tensor, backend: str | None
) -> None:
    dequantize(rows, RowFormat.parse(fmt, out.shape[-1]), slots, out, backend)


def _dequantize_fake(
    rows: torch.Tensor, fmt: str, slots: torch.Tensor, out: torch.Tensor, backend: str | None
) -> None:
    check_dequantize(rows, RowFormat.parse(fmt, int(out.shape[-1])), slots, out)


append_rows_op = torch_op("append_rows", APPEND_ROWS, _append, _append_fake)
dequantize_pages_op = torch_op("dequantize_pages", DEQUANTIZE_PAGES, _dequantize, _dequantize_fake)
