"""The fused attention call, and the merge of partial results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch

from ..arguments import check_flag, check_num_splits, check_scale, check_tensors
from ..errors import ConfigError, DeviceError, ShapeError
from ..rows.format import RowFormat
from ..rows.segment import Segment
from .attention_backends import attend
from .attention_torch import attend_segments_op, decode_attention_op

State = tuple[torch.Tensor, torch.Tensor]


@overload
def decode_attention(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    k_format: str | RowFormat,
    v_format: str | RowFormat,
    block_table: torch.Tensor | None = ...,
    sm_scale: float | None = ...,
    return_lse: Literal[False] = ...,
    num_splits: int | None = ...,
    backend: str | None = ...,
) -> torch.Tensor: ...
@overload
def decode_attention(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    k_format: str | RowFormat,
    v_format: str | RowFormat,
    block_table: torch.Tensor | None = ...,
    sm_scale: float | None = ...,
    return_lse: Literal[True],
    num_splits: int | None = ...,
    backend: str | None = ...,
) -> State: ...
@overload
def decode_attention(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    k_format: str | RowFormat,
    v_format: str | RowFormat,
    block_table: torch.Tensor | None = ...,
    sm_scale: float | None = ...,
    return_lse: bool = ...,
    num_splits: int | None = ...,
    backend: str | None = ...,
) -> torch.Tensor | State: ...
def decode_attention(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    k_format: str | RowFormat,
    v_format: str | RowFormat,
    block_table: torch.Tensor | None = None,
    sm_scale: float | None = None,
    return_lse: bool = False,
    num_splits: int | None = None,
    backend: str | None = None,
) -> torch.Tensor | State:
    """Attend one new token of each sequence to packed rows, dequantizing on the way.

    No dequantized copy of the cache is made. Query head h reads KV head h // (num_q_heads /
    num_kv_heads). torch.compile takes the call as one op, with fullgraph=True too.

    Args:
        q: [batch, num_q_heads, head_dim], float32 (not on CUDA), bfloat16 or float16; num_q_heads
            is a multiple of num_kv_heads, in any ratio.
        k_rows: [batch, num_kv_heads, capacity, row bytes of k_format], uint8; with a block_table
            [num_pages, num_kv_heads, page_size, row bytes of k_format], page_size 16, 32, 64 or
            128. Rows are contiguous, the other axes may have any strides.
        v_rows: likewise, of the row bytes of v_format.
        seq_lens: [batch], int32: rows in use, the first ones; the rest is not read.
        k_format: format of k_rows, or its short name ("int4-g4").
        v_format: format of v_rows, or its short name (then of the head_dim of q).
        block_table: [batch, max_pages], int32: the pages of each sequence, in the order of its
            tokens; entries after the last page in use are not read.
        sm_scale: factor on q·k, on CUDA a positive one; 1 / sqrt(head_dim) when None.
        return_lse: return the log-sum-exp of the scaled scores as well.
        num_splits: parts the tokens are cut into, at least (on CUDA those of the first segment, at
            most: every part has a tile for each warp, and the merge has room for them);
            chosen from the work when None.
        backend: "cpu" or "cuda" (numba), or "reference" (float64 torch, slow); by the device of q
            when None.

    Returns:
        out [batch, num_q_heads, head_dim of v_format], the dtype of q; with return_lse also lse
        [batch, num_q_heads], float32, base e. A sequence of length 0 gives zeros and lse -inf. On
        the CPU a head with a score that float32 cannot hold, as of an infinite query, gives NaN,
        out and lse. Neither has a gradient.

    Raises:
        ShapeError: the tensors do not fit one another, or a length is over the capacity or a page
            does not exist (on CUDA these values are read in debug mode only; see kvquant.debug).
        ConfigError: a dtype, a format or the backend does not exist, sm_scale or num_splits is not
            possible, or an argument is of another type.
        DeviceError: the tensors lie on different devices, or none of the backends serves theirs.
        UnsupportedError: the kernel, the GPU or what is installed cannot do it.
    """
    if torch.compiler.is_compiling():
        num_splits, sm_scale = _plain(num_splits, sm_scale)
        check_flag("return_lse", return_lse)
        if isinstance(k_format, RowFormat) and k_format.head_dim != q.shape[-1]:
            RowFormat.parse(k_format, q.shape[-1])  # tells what does not fit
        v_head_dim = v_format.head_dim if isinstance(v_format, RowFormat) else q.shape[-1]
        results = decode_attention_op(
            q.detach(),
            k_rows,
            v_rows,
            seq_lens,
            str(k_format),
            str(v_format),
            None,
            block_table,
            v_head_dim,
            sm_scale,
            return_lse,
            num_splits,
            backend,
        )
        return (results[0], results[1]) if return_lse else results[0]
    rows = k_rows, v_rows, seq_lens, k_format, v_format, None, block_table, 0, None
    out, lse = attend(q, (rows,), sm_scale, return_lse, num_splits, backend)
    return out if lse is None else (out, lse)


@overload
def attend_segments(
    q: torch.Tensor,
    segments: Sequence[Segment],
    *,
    sm_scale: float | None = ...,
    return_lse: Literal[False] = ...,
    num_splits: int | None = ...,
    backend: str | None = ...,
) -> torch.Tensor: ...
@overload
def attend_segments(
    q: torch.Tensor,
    segments: Sequence[Segment],
    *,
    sm_scale: float | None = ...,
    return_lse: Literal[True],
    num_splits: int | None = ...,
    backend: str | None = ...,
) -> State: ...
@overload
def attend_segments(
    q: torch.Tensor,
    segments: Sequence[Segment],
    *,
    sm_scale: float | None = ...,
    return_lse: bool = ...,
    num_splits: int | None = ...,
    backend: str | None = ...,
) -> torch.Tensor | State: ...
def attend_segments(
    q: torch.Tensor,
    segments: Sequence[Segment],
    *,
    sm_scale: float | None = None,
    return_lse: bool = False,
    num_splits: int | None = None,
    backend: str | None = None,
) -> torch.Tensor | State:
    """Attend as decode_attention does, to the tokens of several segments at once.

    Args:
        q: [batch, num_q_heads, head_dim].
        segments: at least one, all of the same batch, num_kv_heads and head dims.
        sm_scale, return_lse, num_splits, backend: as in decode_attention.

    Returns:
        As decode_attention.
    """
    if torch.compiler.is_compiling():
        num_splits, sm_scale = _plain(num_splits, sm_scale)
        check_flag("return_lse", return_lse)
        if not segments:
            raise ShapeError("no segments: attention needs at least one")
        first = segments[0].v_format
        results = attend_segments_op(
            q.detach(),
            [segment.k_rows for segment in segments],
            [segment.v_rows for segment in segments],
            [segment.seq_lens for segment in segments],
            [str(segment.k_format) for segment in segments],
            [str(segment.v_format) for segment in segments],
            [segment.starts for segment in segments],
            [segment.block_table for segment in segments],
            [segment.sinks for segment in segments],
            [segment.seq_slots for segment in segments],
            first.head_dim if isinstance(first, RowFormat) else q.shape[-1],
            sm_scale,
            return_lse,
            num_splits,
            backend,
        )
        return (results[0], results[1]) if return_lse else results[0]
    out, lse = attend(q, segments, sm_scale, return_lse, num_splits, backend)
    return out if lse is None else (out, lse)


def _plain(num_splits: int | None, sm_scale: float | None) -> tuple[int | None, float | None]:
    """Options that an op of torch takes as they are meant: it would take True for 1."""
    if sm_scale is not None:
        sm_scale = check_scale(sm_scale)
    return check_num_splits(num_splits), sm_scale


def merge_states(*states: State) -> State:
    """Merge attention over disjoint sets of tokens into attention over all of them, exactly.

    Args:
        states: pairs of out [..., head_dim] and lse [...], base e, as decode_attention returns
            them; lse -inf marks a state without tokens, whose out does not matter.

    Returns:
        out, the dtype of the first one, and lse, float32 (float64 if any lse is). Computed in the
        dtype of lse. Where no state has tokens: zeros and -inf. Where an lse is +inf out is NaN.

    Raises:
        ShapeError: no state, or states that do not fit one another.
        ConfigError: a state is no pair of tensors of floats.
        DeviceError: they lie on several devices.

    Source: the attention states of FlashInfer (https://arxiv.org/abs/2501.01005), there in base 2.
    """
    if not states:
        raise ShapeError("merge_states needs at least one (out, lse)")
    for state in states:
        pair = isinstance(state, tuple | list) and len(state) == 2
        if not pair or not all(isinstance(x, torch.Tensor) for x in state):
            raise ConfigError(
                f"a state is a {type(state).__name__} and no pair of tensors: give the states one "
                "by one, merge_states((out, lse), (out, lse)), and a list as merge_states(*states)"
            )
        check_tensors(out=state[0], lse=state[1])
        if not state[0].is_floating_point() or not state[1].is_floating_point():
            raise ConfigError(f"out is {state[0].dtype} and lse {state[1].dtype}: use floats")
    states = tuple((out.detach(), lse.detach()) for out, lse in states)
    first_out = states[0][0]
    for out, lse in states:
        if out.device != first_out.device or lse.device != first_out.device:
            raise DeviceError(f"states on {first_out.device}, {out.device} and {lse.device}")
        if out.shape != first_out.shape or lse.shape != out.shape[:-1]:
            raise ShapeError(
                f"out {list(out.shape)} with lse {list(lse.shape)} cannot be merged with out "
                f"{list(first_out.shape)}: outs must be alike, and lse an out without its last axis"
            )
    lses = torch.stack([lse if lse.dtype == torch.float64 else lse.float() for _, lse in states])
    lse = lses.logsumexp(0)
    # all empty: exp(-inf - 0) = 0; where a score was infinite: NaN, as in decode_attention
    weights = (lses - lse.masked_fill(lse == -torch.inf, 0.0)).exp()
    outs = torch.stack([out.to(lses.dtype) for out, _ in states])
    parts = torch.where(lses[..., None] == -torch.inf, 0.0, weights[..., None] * outs)
    return parts.sum(0).to(first_out.dtype), lse
