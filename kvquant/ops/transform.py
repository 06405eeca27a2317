"""Queries into a basis, outputs out of it: 16 bit on CUDA by affine_rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..rehearsal import is_rehearsed
from ..rows.arguments import check_scale, check_tensors
from ..rows.basis import Basis, LayerBasis, Queries
from .dispatch import torch_op

TURN_ROWS = "(Tensor x, Tensor? matrix, Tensor? offset, Tensor? seq_lens) -> Tensor"
FLOAT32_MAX = torch.finfo(torch.float32).max
DTYPES = (torch.bfloat16, torch.float16)


def transform_query(
    q: torch.Tensor,
    basis: Basis,
    sm_scale: float | None,
    backend: str | None,
    check: Callable[[], None],
) -> tuple[torch.Tensor, float | None]:
    """Bring queries into the basis of K; return them with the factor on their scores."""
    check_tensors(q=q)
    if q.requires_grad:
        q = q.detach()
    sm_scale = None if sm_scale is None else check_scale(sm_scale)
    if not takes_one_launch(q, backend):
        if not torch.compiler.is_compiling():  # then torch tells what cannot be transformed
            check()
        return basis.transform_query(q), sm_scale
    matrix, sm_scale = _matrix_for(q, basis, sm_scale)
    return (q if matrix is None else affine_rows(q, matrix, check=check)), sm_scale


def _matrix_for(
    q: torch.Tensor, basis: Basis, sm_scale: float | None
) -> tuple[torch.Tensor | None, float | None]:
    """The matrix of a basis for 16-bit queries, and the factor on their scores."""
    if q.dtype != torch.float16:
        return basis.matrix, sm_scale
    # fp16 may not hold what the query becomes
    return basis.fp16_matrix, basis.fp16_factor * (
        q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    )


def queries_of(
    q: torch.Tensor, basis: LayerBasis | None, sm_scale: float | None, backend: str | None
) -> tuple[Queries, float | None] | None:
    """What transform_query would multiply, for an append's launch; None unless one launch does."""
    if basis is None or not takes_one_launch(q, backend) or torch.compiler.is_compiling():
        return None
    sm_scale = None if sm_scale is None else check_scale(sm_scale)
    matrix, sm_scale = _matrix_for(q, basis.k, sm_scale)
    return None if matrix is None else (Queries(q.detach(), matrix), sm_scale)


def restore_result(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    basis: LayerBasis,
    seq_lens: torch.Tensor | None,
    sm_scale: float | None,
    backend: str | None,
    is_whole: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Bring attention over rows in a basis back to that over the original rows.

    Args:
        out: [batch, num_q_heads, head_dim of V] or [batch, q_len, num_q_heads, head_dim of V].
        lse: the shape of out without its last axis, or None.
        q: the queries, before transform_query.
        seq_lens: [batch or more], or [batch, q_len], int32: tokens that a query sees; without
            any, out is 0 and lse -inf. None where every query sees tokens.
        is_whole: whether lse includes the missing_scores already.
    """
    is_launched = takes_one_launch(q, backend)
    is_empty = None
    if seq_lens is not None and not (is_launched and lse is None):  # it is a launch of its own
        is_empty = seq_lens[: len(q), ..., None] == 0
    if basis.v.is_identity:
        out = out.to(q.dtype)
    elif is_launched:
        overlaps = lse is None and q.ndim == 3  # nothing else was launched since
        out = affine_rows(out, basis.v.transposed, basis.v.offset, seq_lens, overlaps=overlaps)
    else:
        out = basis.v.restore(out)
        if is_empty is not None:  # the offset was added; and whatever they hold, NaN even, is lost
            out = out.masked_fill(is_empty[..., None], 0)
        out = out.to(q.dtype)
    if lse is None:
        return out, None
    if not is_whole:
        lse = lse.add(basis.k.missing_score(q.detach()), alpha=_held_scale(q, sm_scale))
    return out, lse if is_empty is None else lse.masked_fill(is_empty, -torch.inf)


def missing_scores(q: torch.Tensor, basis: Basis, sm_scale: float | None) -> torch.Tensor:
    """The term sm_scale * q·offset that all scores of q lack: [..., num_q_heads], float32."""
    return basis.missing_score(q.detach()) * _held_scale(q, sm_scale)


def _held_scale(q: torch.Tensor, sm_scale: float | None) -> float:
    """The factor on scores, clamped to float32: with a larger one every score is NaN anyway."""
    scale = q.shape[-1] ** -0.5 if sm_scale is None else check_scale(sm_scale)
    return FLOAT32_MAX if abs(scale) > FLOAT32_MAX else scale


def takes_one_launch(x: torch.Tensor, backend: str | None) -> bool:
    """Whether affine_rows serves these rows: 16 bit on CUDA, and not the reference."""
    return (x.is_cuda or is_rehearsed(x)) and x.dtype in DTYPES and backend != "reference"


def affine_rows(
    x: torch.Tensor,
    matrix: torch.Tensor | None,
    offset: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    *,
    check: Callable[[], None] | None = None,
    overlaps: bool = False,
) -> torch.Tensor:
    """Multiply rows by the matrix of their KV head and add its offset, in float32.

    Args:
        x: [batch, num_q_heads, head_dim] or [batch, q_len, num_q_heads, head_dim], bfloat16 or
            float16, on CUDA.
        matrix: [num_kv_heads, head_dim, head_dim], float32, contiguous but for the first axis; a
            row is multiplied from the left. None for none, then there is an offset.
        offset: [num_kv_heads, head_dim], float32, contiguous; None for none.
        seq_lens: [batch or more], or [batch, q_len], int32: zeros for rows of length 0; None
            without.
        check: raises unless the queries fit their rows; called for uncached launches only.
        overlaps: whether the last launch on this stream is the attention that gives x, and
            writes neither matrix nor offset: then this launch may begin before it ends.

    Returns:
        The same shape and dtype, rounded once, contiguous.

    The arguments fit: it raises DeviceError if CUDA refuses, UnsupportedError if the GPU is too
    old, or what is installed cannot do it.
    """
    if x.ndim == 4:  # the rows of each query as those of a sequence of its own
        lens = None if seq_lens is None else seq_lens.flatten()
        rows = x.flatten(0, 1)
        return affine_rows(rows, matrix, offset, lens, check=check, overlaps=overlaps).view(x.shape)
    if torch.compiler.is_compiling():
        turned: torch.Tensor = affine_rows_op(x.detach(), matrix, offset, seq_lens)
    else:
        turned = _launch(x, matrix, offset, seq_lens, check=check, overlaps=overlaps)
    return turned


def _launch(*given: Any, check: Callable[[], None] | None = None, overlaps: bool = False) -> Any:
    return _launcher()(*given, check, overlaps=overlaps)


@functools.cache
def _launcher() -> Callable[..., torch.Tensor]:
    from ..kernels.cuda.affine.launch import affine_rows

    return affine_rows


affine_rows_op = torch_op("affine_rows", TURN_ROWS, _launch, lambda x, *_: x.new_empty(x.shape))
