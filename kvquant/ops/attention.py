"""Attention over rows: the public call and the op of torch.

Under torch.compile only, torch.ops.kvquant.attend_segments gives [out], or [out, lse]. It takes a
list for each field of a segment, and formats by name. Its dispatcher takes a few microseconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch

from .. import debug
from ..errors import ShapeError
from ..rehearsal import is_rehearsed
from ..rows.arguments import (
    FLOATS,
    check_flag,
    check_num_splits,
    check_readable,
    check_scale,
    check_tensor,
)
from ..rows.basis import LayerBasis
from ..rows.call import AttentionCall
from ..rows.format import RowFormat, check_head_dims
from ..rows.indptr import check_indptr_values, visible_to_rows
from ..rows.quantize import check_format
from ..rows.reference import reference_over_segments
from ..rows.segment import (
    Segment,
    check_q_len_values,
    check_segment_values,
    check_segments,
    parse_formats,
    visible_tokens,
)
from ..rows.variant import (
    PLAIN,
    AttentionVariant,
    add_sinks,
    check_variant,
    check_variant_values,
    in_use,
)
from .dispatch import WRONG_TYPES, kernels_for, torch_op
from .transform import missing_scores, restore_result, transform_query

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Unpack

    from ..rows.options import No, OpOptions, Yes

State = tuple[torch.Tensor, torch.Tensor]
Result = tuple[torch.Tensor, "torch.Tensor | None"]  # no lse where it was not asked for
Transformed = tuple[torch.Tensor, "float | None"]
ATTEND_SEGMENTS = (
    "(Tensor q, Tensor[] k_rows, Tensor[] v_rows, Tensor[] seq_lens, str[] k_formats, "
    "str[] v_formats, Tensor?[] starts, Tensor?[] block_tables, int[] sinks, Tensor?[] seq_slots, "
    "int v_head_dim, float? sm_scale, bool return_lse, SymInt? num_splits, str? backend, "
    "Tensor? q_lens, Tensor? q_indptr, bool padded, float? soft_cap, Tensor? sink_logits, "
    "Tensor? alibi_slopes, SymInt? window, Tensor? tree_mask, "
    "Tensor? score_offsets) -> Tensor[]"
)


@overload
def decode_attention(
    q: Tensor, k_rows: Tensor, v_rows: Tensor, seq_lens: Tensor, **options: Unpack[OpOptions[No]]
) -> Tensor: ...
@overload
def decode_attention(
    q: Tensor, k_rows: Tensor, v_rows: Tensor, seq_lens: Tensor, **options: Unpack[OpOptions[Yes]]
) -> State: ...
def decode_attention(
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
    num_splits: int | None = None,
    backend: str | None = None,
) -> torch.Tensor | State:
    """Attend one new token of each sequence, or its last few, to quantized rows.

    Kernels read the rows without a dequantized copy of the cache. Query head h reads KV head h //
    (num_q_heads / num_kv_heads). torch.compile(fullgraph=True) takes the call as one op.

    The queries of a sequence are those of its last tokens, whose rows are there already. Query i
    sees the first seq_len - q_lens + i + 1 tokens, none if that is not positive. One call reads
    rows once for several queries (drafted tokens), and takes ragged ones (q_indptr: chunks of
    prompts beside decode steps) without padding.

    Args:
        q: [batch, num_q_heads, head_dim], or [batch, q_len, num_q_heads, head_dim] for several
            queries of each sequence, or with q_indptr [total, num_q_heads, head_dim]; float32 (not
            on CUDA), bfloat16 or float16; num_q_heads is a multiple of num_kv_heads, in any ratio.
        k_rows: [batch, num_kv_heads, capacity, row bytes of k_format], uint8; with a block_table
            [num_pages, num_kv_heads, page_size, row bytes of k_format], page_size 1, 2, 4, 8, 16,
            32, 64, 128 or 256. Rows are contiguous, the other axes may have any strides.
        v_rows: the same for V, with the row bytes of v_format.
        seq_lens: [batch], int32: rows in use, the first ones; the rest may hold anything.
        k_format: format of k_rows, or its short name ("int4-g4").
        v_format: format of v_rows, or its short name (then of the head_dim of q).
        block_table: [batch, max_pages], int32: the pages of each sequence, in the order of its
            tokens; entries after the last page in use are not read.
        q_lens: [batch], int32: queries of each sequence, the first rows of q; q_len when None.
            Only for q of four axes.
        q_indptr: [batch + 1], int32, on the device of q: sequence i has rows q_indptr[i] to
            q_indptr[i + 1] of q. It begins with 0, never falls and ends with total. A CUDA graph
            may be replayed with other values; spare rows go to a sequence of 0 tokens. Not with a
            tree_mask.
        variant: what the model changes in attention (see AttentionVariant); nothing when None.
        sm_scale: factor on q·k, on CUDA a positive one; 1 / sqrt(head_dim) when None.
        return_lse: return the log-sum-exp of the scaled scores as well. This rules out a faster
            Hopper kernel that rounds K and V to fp16 (see kvquant/ops/README.md).
        num_splits: splits of the tokens (split-K), on the CPU at least, on CUDA at most. When
            None CUDA shares work by the lengths: the last bits of a result may depend on other
            lengths.
        backend: "cpu" or "cuda" (numba), or "reference" (float64 torch, slow); by device when
            None.

    Returns:
        out, the shape (with the head_dim of v_format) and dtype of q; with return_lse also lse of
        that shape without its last axis, float32, base e. Padding, and queries that see no token,
        give zeros and lse -inf. A score that float32 cannot hold gives a NaN head on the CPU. NaN
        in a row reaches the queries that see it; on CUDA, in a row of V, all of its sequence. out
        and lse have no gradient.

    Raises:
        ShapeError: the tensors do not fit one another, a length is over the capacity, a page
            does not exist, or q_lens or q_indptr are not as above. On CUDA values are read in debug
            mode only (see kvquant.debug): else q_lens are clamped to 0 to q_len and q_indptr to 0
            to total, and rows of q after its last entry give zeros.
        ConfigError: a dtype, a format or the backend does not exist, sm_scale or num_splits is not
            possible, or an argument is of another type.
        DeviceError: the tensors lie on different devices, or none of the backends serves theirs.
        UnsupportedError: the kernel, the GPU or what is installed cannot do it.

    Example:
        >>> import torch
        >>> from kvquant import decode_attention, quantize_rows
        >>> k, v = torch.randn(2, 1, 8, 100, 128)  # [batch, num_kv_heads, tokens, head_dim] each
        >>> out = decode_attention(
        ...     torch.randn(1, 32, 128),
        ...     quantize_rows(k, "int8"),
        ...     quantize_rows(v, "int4-g4"),
        ...     torch.tensor([100], dtype=torch.int32),
        ...     k_format="int8",
        ...     v_format="int4-g4",
        ... )
        >>> out.shape
        torch.Size([1, 32, 128])

        The last 3 tokens of one sequence, and the last 2 of another:

        >>> rows = quantize_rows(torch.randn(2, 8, 100, 128), "int8")
        >>> out = decode_attention(
        ...     torch.randn(2, 3, 32, 128),  # [batch, q_len, num_q_heads, head_dim]
        ...     rows,
        ...     rows,
        ...     torch.tensor([100, 57], dtype=torch.int32),
        ...     k_format="int8",
        ...     v_format="int8",
        ...     q_lens=torch.tensor([3, 2], dtype=torch.int32),
        ... )
        >>> out.shape, bool(out[1, 2].any())
        (torch.Size([2, 3, 32, 128]), False)

        A chunk of 50 tokens of one prompt, and the last token of another sequence:

        >>> out = decode_attention(
        ...     torch.randn(51, 32, 128),  # [total, num_q_heads, head_dim]
        ...     rows,
        ...     rows,
        ...     torch.tensor([100, 57], dtype=torch.int32),
        ...     k_format="int8",
        ...     v_format="int8",
        ...     q_indptr=torch.tensor([0, 50, 51], dtype=torch.int32),
        ... )
        >>> out.shape
        torch.Size([51, 32, 128])
    """
    segment = Segment(k_rows, v_rows, seq_lens, k_format, v_format, None, block_table)  # type: ignore[arg-type]
    try:
        out, lse = attend(
            AttentionCall(
                q, [segment], sm_scale, num_splits, return_lse, q_lens, variant, backend, q_indptr
            )
        )
        return out if lse is None else (out, lse)
    except ShapeError:
        if isinstance(k_format, RowFormat) and q.ndim in (3, 4):
            RowFormat.parse(k_format, q.shape[-1])  # says which of them has another head_dim
        raise


def attend(
    call: AttentionCall,
    basis: LayerBasis | None = None,
    seq_lens: torch.Tensor | None = None,
    transformed: Transformed | None = None,
    *,
    in_op: bool = False,
) -> Result:
    """Attend to rows, which may be stored in a basis; raises as decode_attention.

    On CUDA the launcher checks a call only when it has not seen one of its kind.

    Args:
        call: its queries, and the results, are outside of the basis.
        basis: of the rows; None if they are stored untransformed.
        seq_lens: [batch or more], int32: tokens of each sequence in all segments; for a basis
            and one query a sequence, where a sequence may be empty.
        transformed: q in the basis and its factor, if an append (write_rows) has computed them.
        in_op: whether the op of torch is running, which must not call itself.

    lse is None unless the call asks for it.
    """
    q, segments, _, num_splits, return_lse, q_lens, variant, backend, *_ = call
    if variant is not None:
        variant = in_use(variant)
        call = call._replace(variant=variant)
    if basis is not None:
        return _attend_in_basis(call, basis, seq_lens, transformed)
    if torch.compiler.is_compiling() and not in_op:
        return _attend_traced(call)
    if num_splits is not None and type(num_splits) is not int:
        call = call._replace(num_splits=check_num_splits(num_splits))
    if type(return_lse) is not bool:
        check_flag("return_lse", return_lse)
    try:
        if q.is_cuda and (backend is None or backend == "cuda") and not debug.enabled:
            return _cuda_kernel()(call, _check_cuda)
        backend = kernels_for(q, backend)
        if backend != "cpu":
            return _attend_checked(call, backend)
        is_plain = q.ndim == 3 and variant is None is call.q_indptr and q.numel() > 0
        out, lse = cpu_kernel()(call, _check_scaled if is_plain else _check_values)
        return out.to(q.dtype), lse if return_lse else None
    except WRONG_TYPES:
        check_types(q, segments, q_lens, call.q_indptr)
        if variant is not None:
            check_variant(q, variant)
        raise


def _attend_in_basis(
    call: AttentionCall,
    basis: LayerBasis,
    seq_lens: torch.Tensor | None,
    transformed: Transformed | None,
) -> Result:
    q, segments, sm_scale, _, return_lse, q_lens, variant, backend, *_ = call
    if transformed is None:  # else a step has checked them
        check_tensor("q", q, FLOATS)
        if variant is not None and not torch.compiler.is_compiling():
            check_variant(q, variant)
        check = functools.partial(check_segments, q, segments, q_lens, call.q_indptr)
        transformed = transform_query(q, basis.k, sm_scale, backend, check)
    sinks, is_whole, wants_lse = None, False, return_lse
    if variant is not None:
        # a value of zero in the basis is not one outside of it: sinks come at the end
        sinks, wants_lse = variant.sink_logits, True
        variant = variant._replace(sink_logits=None)
        variant, is_whole = with_missing_scores(variant, q, basis, sm_scale)
    stored, scale = transformed
    if call.q_indptr is not None:  # before attention: what follows that may begin while it ends
        seq_lens = visible_to_rows(_tokens_of(segments), call.q_indptr, q.shape[0])
    out, lse = attend(
        call._replace(q=stored, sm_scale=scale, return_lse=wants_lse, variant=variant)
    )
    if variant is not None and lse is not None:  # masks may hide all that is there
        seq_lens = (lse != -torch.inf).any(-1).int()
        lse = lse if return_lse or sinks is not None else None
    elif q.ndim == 4:
        seq_lens = visible_tokens(_tokens_of(segments), q_lens, q.shape[1])
    out, lse = restore_result(out, lse, q, basis, seq_lens, sm_scale, backend, is_whole)
    if sinks is not None and lse is not None:
        out, lse = add_sinks(out, lse, sinks)
    return out, lse if return_lse else None


def _tokens_of(segments: Sequence[Segment]) -> torch.Tensor:
    """Tokens of each sequence in all segments, [batch], int32."""
    return torch.stack([segment.seq_lens for segment in segments]).sum(0, dtype=torch.int32)


def with_missing_scores(
    variant: AttentionVariant, q: torch.Tensor, basis: LayerBasis, sm_scale: float | None
) -> tuple[AttentionVariant, bool]:
    """The variant for rows in a basis, and whether lse includes the missing scores.

    Softmax does not see the missing part of the scores, but a soft cap does.
    """
    if variant.soft_cap is None:
        return variant, False
    offsets = missing_scores(q, basis.k, sm_scale)
    if variant.score_offsets is not None:
        offsets = offsets + variant.score_offsets
    return variant._replace(score_offsets=offsets), True


def _attend_checked(call: AttentionCall, backend: str) -> Result:
    """Attend by the reference, or on CUDA in debug mode."""
    call = _check_values(call)
    if backend == "cuda":
        _require_extra()
        return _cuda_kernel()(call)
    options = call.q_lens, call.variant, call.q_indptr
    out, lse = reference_over_segments(call.q, call.segments, call.sm_scale, *options)
    return out.to(call.q.dtype), lse.float() if call.return_lse else None


def _check_scaled(call: AttentionCall) -> AttentionCall:
    """Check the call but for values; return it with formats, a scale and no gradient."""
    call = _check(call)
    q, sm_scale = call.q, call.sm_scale
    sm_scale = q.shape[-1] ** -0.5 if sm_scale is None else check_scale(sm_scale)
    return call._replace(q=q.detach() if q.requires_grad else q, sm_scale=sm_scale)


def _check_values(call: AttentionCall) -> AttentionCall:
    """_check_scaled, with readable values."""
    call = _check_scaled(call)
    q, segments, _, _, _, q_lens, variant, *_ = call
    if q.is_cpu or (debug.enabled and not is_rehearsed(q)) or call.backend == "reference":
        check_segment_values(segments)
        if q_lens is not None:
            check_q_len_values(q, q_lens)
        if call.q_indptr is not None:
            check_indptr_values(q, call.q_indptr, padded=call.padded)
        if variant is not None:
            check_variant_values(q, q_lens, variant)
    return call


@functools.cache
def cpu_kernel() -> Callable[..., State]:
    """The CPU's kernel."""
    from ..kernels.cpu.decode import attend

    return attend


@functools.cache
def _cuda_kernel() -> Callable[..., Result]:
    from ..kernels.cuda.decode.launch import attend

    return attend


def _require_extra() -> None:
    from ..kernels.cuda.runtime.compile import require_extra

    require_extra()


def _check(call: AttentionCall) -> AttentionCall:
    """Check the call; return it with formats in place of their names."""
    q, segments, _, num_splits, _, q_lens, variant, *_ = call
    made = []
    for segment in segments:
        if type(segment[3]) is not RowFormat or type(segment[4]) is not RowFormat:
            segment = parse_formats(q, segment)  # which checks them
        else:
            check_head_dims(segment[3], segment[4])
        made.append(segment)
    check_tensor("q", q, FLOATS)
    if num_splits is not None:
        check_num_splits(num_splits)
    check_segments(q, made, q_lens, call.q_indptr)
    if variant is not None:
        check_variant(q, variant)
    return call._replace(segments=made)


def _check_cuda(call: AttentionCall) -> AttentionCall:
    checked = _check(call)
    _require_extra()
    return checked


def check_types(
    q: torch.Tensor,
    segments: Sequence[Segment],
    q_lens: torch.Tensor | None = None,
    q_indptr: torch.Tensor | None = None,
) -> None:
    check_readable(q=q)
    if q_lens is not None:
        check_readable(q_lens=q_lens)
    if q_indptr is not None:
        check_readable(q_indptr=q_indptr)
    for segment in segments:
        check_readable(k_rows=segment.k_rows, v_rows=segment.v_rows, seq_lens=segment.seq_lens)
        if segment.block_table is not None:
            check_readable(block_table=segment.block_table)
        for fmt in segment[3:5]:
            if not isinstance(fmt, str):
                check_format(fmt)


def _attend_traced(call: AttentionCall) -> Result:
    q, segments, sm_scale, num_splits, return_lse, q_lens, variant, backend, *_ = call
    check_flag("return_lse", return_lse)  # torch would take True for 1, here and below
    head_dim = q.shape[-1]
    for fmt in [segment.k_format for segment in segments]:
        if isinstance(fmt, RowFormat) and fmt.head_dim != head_dim:
            RowFormat.parse(fmt, head_dim)  # says what does not fit
    v_format = segments[0].v_format
    named = [one._replace(k_format=str(one[3]), v_format=str(one[4])) for one in segments]  # type: ignore[arg-type]
    results = attend_segments_op(
        q.detach(),
        *map(list, zip(*named, strict=True)),
        v_format.head_dim if isinstance(v_format, RowFormat) else head_dim,
        None if sm_scale is None else check_scale(sm_scale),
        return_lse,
        check_num_splits(num_splits),
        backend,
        q_lens,
        call.q_indptr,
        call.padded,
        *(variant or PLAIN),
    )
    return results[0], results[1] if return_lse else None


def segment_of(
    q: torch.Tensor,
    v_head_dim: int,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    k_format: str,
    v_format: str,
    *others: Any,
) -> Segment:
    """A segment from the arguments of an op, with formats by name."""
    head_dim = int(q.shape[-1])  # a number of its own while torch traces any shape
    k, v = RowFormat.parse(k_format, head_dim), RowFormat.parse(v_format, v_head_dim)
    return Segment(k_rows, v_rows, seq_lens, k, v, *others)


def _op_call(q: torch.Tensor, *args: Any) -> AttentionCall:
    count = len(args) - len(PLAIN)
    *fields, v_head_dim, sm_scale, return_lse, num_splits, backend = args[: count - 3]
    q_lens, q_indptr, padded = args[count - 3 : count]
    segments = [segment_of(q, v_head_dim, *one) for one in zip(*fields, strict=True)]
    variant = AttentionVariant(*args[count:])
    options = sm_scale, num_splits, return_lse, q_lens, variant, backend, q_indptr, padded
    return AttentionCall(q, segments, *options)


def _attend_op(*args: Any) -> list[torch.Tensor]:
    out, lse = attend(_op_call(*args), in_op=True)
    return [out] if lse is None else [out, lse]


def _attend_fake(*args: Any) -> list[torch.Tensor]:
    call = _op_call(*args)
    q = call.q
    check_segments(q, call.segments, call.q_lens, call.q_indptr)
    variant = in_use(call.variant)
    if variant is not None:
        check_variant(q, variant)
    out = q.new_empty(*q.shape[:-1], call.segments[0].v_format.head_dim)
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    return [out, lse] if call.return_lse else [out]


attend_segments_op = torch_op("attend_segments", ATTEND_SEGMENTS, _attend_op, _attend_fake)
