"""Attention over latent rows (multi-head latent attention, MLA), with absorbed queries.

torch.ops.kvquant.attend_latents gives [out], or [out, lse], under torch.compile.

K of a head is W_UK latent beside the RoPE part, V is W_UV latent. Absorption avoids both:

    q · (W_UK latent) = (W_UK^T q) · latent        sum of p W_UV latent = W_UV (sum of p latent)

With q_latent = W_UK^T q the heads share one K, the row, and one V, its latent; W_UV is applied to
the result. So rows are segments of one KV head (rows/segment.py), whose V rows are the first bytes
of its K rows; reference and CPU kernel are those of all rows.

A prefix that sequences share is read once, as in shared_prefix.py; on CUDA by one more launch:

    prefix      1 sequence, batch x q_len x heads columns ──▶ parts 0 .. n-1 ┐
    own rows    batch sequences, q_len x heads columns    ──▶ parts n .. m   ┴──▶ combined

Sequences that do not share it ignore the parts before n.

Source: DeepSeek-V2 (https://arxiv.org/abs/2405.04434), 2.1.2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch

from .. import debug
from ..errors import ConfigError, ShapeError, shown
from ..rehearsal import is_rehearsed
from ..rows.arguments import (
    FLOATS,
    check_flag,
    check_num_splits,
    check_readable,
    check_same_device,
    check_scale,
    check_tensor,
    check_tensors,
)
from ..rows.basis import LayerBasis
from ..rows.call import AttentionCall, LatentCall, LatentPrefix
from ..rows.latent import LatentFormat
from ..rows.quantize import check_rows
from ..rows.reference import reference_over_segments
from ..rows.segment import (
    Segment,
    check_q_len_values,
    check_segment_values,
    check_segments,
    latent_segment,
    visible_tokens,
)
from .attention import Result, State, cpu_kernel
from .dispatch import WRONG_TYPES, kernels_for, torch_op
from .merge import merge_states
from .transform import takes_one_launch

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Unpack

    from ..rows.options import MlaOptions, No, Yes

ATTEND_LATENTS = (
    "(Tensor q_latent, Tensor q_rope, Tensor[] rows, Tensor[] seq_lens, str[] formats, "
    "Tensor?[] starts, Tensor?[] block_tables, int[] sinks, Tensor?[] seq_slots, Tensor? q_lens, "
    "Tensor? shares, float sm_scale, bool return_lse, SymInt? num_splits, str? backend) -> Tensor[]"
)


@overload
def mla_decode_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    **options: Unpack[MlaOptions[No]],
) -> Tensor: ...
@overload
def mla_decode_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    **options: Unpack[MlaOptions[Yes]],
) -> State: ...
def mla_decode_attention(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    fmt: str | LatentFormat,
    sm_scale: float,
    block_table: torch.Tensor | None = None,
    q_lens: torch.Tensor | None = None,
    return_lse: bool = False,
    num_splits: int | None = None,
    backend: str | None = None,
) -> torch.Tensor | State:
    """Attend one token of each sequence, or its last few, to latent rows.

    Query i of q_len sees the tokens up to its own, seq_len - q_len + i. On CUDA all heads of a
    sequence read its rows once, for K and V.

    Args:
        q_latent: [batch, num_heads, latent_dim] or [batch, q_len, num_heads, latent_dim], float32,
            bfloat16 or float16: W_UK^T q of each head.
        q_rope: the same shape but for its last axis, rope_dim, and the same dtype: the RoPE part.
        rows: [batch, capacity, row_bytes], uint8, the bytes of a row contiguous, the other axes of
            any strides; with a block_table [num_pages, page_size, row_bytes], of pages of 1, 2, 4,
            8, 16, 32, 64, 128 or 256 rows. On CUDA rows must follow one another without gaps, from
            a multiple of 16 bytes on.
        seq_lens: [batch], int32: rows in use; 0 is allowed.
        fmt: format of the rows, or its short name ("int4-g8+int8-g4").
        sm_scale: factor on the scores, the model's: 1 / sqrt(head_dim) of its K before absorption
            (128 + 64, not 512 + 64), times what its RoPE scaling adds.
        block_table: [batch, max_pages], int32: the pages of each sequence; None: no pages.
        q_lens: [batch], int32: queries of each sequence, as in decode_attention.
        return_lse: return the log-sum-exp of the scaled scores as well.
        num_splits: parts to cut each sequence into; by its length when None.
        backend: "cpu" (numba), "cuda" (16-bit queries) or "reference" (float64 torch, slow); by
            device when None.

    Returns:
        out, the shape and dtype of q_latent: each head's weighted sum of latents, for W_UV. With
        return_lse also lse, float32, that shape without the last axis, base e. A query that sees no
        token gives zeros and -inf.

    Raises:
        ShapeError: the tensors do not fit one another, or a length is over the capacity, a page
            does not exist or q_lens are not 0 to q_len (on CUDA read in debug mode only).
        ConfigError: a dtype, the format or the backend does not exist, sm_scale or num_splits
            is not possible, or an argument is of another type; on CUDA also float32 queries, and
            rows with gaps.
        DeviceError: the tensors lie on different devices, or none of the backends serves theirs.
        UnsupportedError: CUDA has no kernel for the format with these queries, for an sm_scale
            that is not positive, or for the GPU.

    Example:
        >>> import torch
        >>> from kvquant import LatentFormat, mla_decode_attention, quantize_rows
        >>> fmt = LatentFormat.parse("int4-g8+int8-g4")
        >>> rows = quantize_rows(torch.randn(2, 100, 512 + 64), fmt)  # 368 bytes a token
        >>> q_latent, q_rope = torch.randn(2, 16, 512), torch.randn(2, 16, 64)
        >>> lens = torch.tensor([100, 57], dtype=torch.int32)
        >>> out = mla_decode_attention(q_latent, q_rope, rows, lens, fmt=fmt, sm_scale=192**-0.5)
        >>> out.shape
        torch.Size([2, 16, 512])
    """
    check_tensors(q_latent=q_latent, q_rope=q_rope, rows=rows, seq_lens=seq_lens)
    if isinstance(fmt, str) and q_latent.ndim and q_rope.ndim:
        fmt = LatentFormat.parse(fmt, int(q_latent.shape[-1]), int(q_rope.shape[-1]))
    if not isinstance(fmt, LatentFormat):
        raise ConfigError(f"the format is {shown(fmt)}: give a name ('int4-g8') or a LatentFormat")
    check_rows(rows, fmt)
    if rows.ndim != 3:
        axes = "batch, capacity" if block_table is None else "num_pages, page_size"
        raise ShapeError(f"rows is {list(rows.shape)}: it must be [{axes}, row_bytes]")
    segment = latent_segment(rows[:, None], seq_lens, fmt, block_table=block_table)
    call = LatentCall(
        q_latent, q_rope, [segment], sm_scale, num_splits, return_lse, q_lens, backend=backend
    )
    out, lse = attend_latents(call)
    return out if lse is None else (out, lse)


def attend_latents(
    call: LatentCall, basis: LayerBasis | None = None, seq_lens: torch.Tensor | None = None
) -> Result:
    """Attend to latent rows, which may be stored in a basis.

    It raises as mla_decode_attention; on CUDA also UnsupportedError for several queries and more
    than two segments.

    Args:
        call: its queries, and the results, are outside of the basis.
        basis: of the rows, k of the latents and v of the RoPE parts; None if untransformed.
        seq_lens: [batch], int32, for a basis: tokens of each sequence in all segments and the
            prefix.
    """
    check_flag("return_lse", call.return_lse)
    scale, num_splits = _scale_of(call.sm_scale), check_num_splits(call.num_splits)
    call = call._replace(sm_scale=scale, num_splits=num_splits)
    if basis is not None and not basis.is_identity:
        assert seq_lens is not None
        return _attend_in_basis(call, basis, seq_lens)
    if not torch.compiler.is_compiling():
        return _attend(call)
    # as _op_call takes them apart: V and its format are parts of K and its
    rows = [(k, lens, str(fmt), *others) for k, _, lens, fmt, _, *others in call.all_segments]
    results: list[torch.Tensor] = attend_latents_op(
        call.q_latent.detach(),
        call.q_rope.detach(),
        *map(list, zip(*rows, strict=True)),
        call.q_lens,
        None if call.prefix is None else call.prefix.shares,
        scale,
        call.return_lse,
        num_splits,
        call.backend,
    )
    return results[0], results[1] if call.return_lse else None


def _attend_in_basis(call: LatentCall, basis: LayerBasis, seq_lens: torch.Tensor) -> Result:
    """Attend to rows in a basis: both parts of a query are transformed as for K.

    The latents' basis is that of K and of V. torch multiplies: the matrix of 512 latents is 1 MiB,
    more than a kernel has room for.
    """
    fmt, sm_scale = call.segments[0].k_format, call.sm_scale
    assert isinstance(fmt, LatentFormat)
    check_queries(call.q_latent, call.q_rope, fmt)
    q_latent, q_rope = call.q_latent.detach(), call.q_rope.detach()
    stored, scale = (basis.k.transform_query(q_latent), basis.v.transform_query(q_rope)), sm_scale
    if takes_one_launch(q_latent, call.backend):  # the kernel takes 16 bit
        if q_latent.dtype == torch.float16:  # which may not hold what the query becomes
            factor = max(basis.k.fp16_factor, basis.v.fp16_factor)
            stored, scale = (stored[0] / factor, stored[1] / factor), sm_scale * factor
        stored = stored[0].to(q_latent.dtype), stored[1].to(q_latent.dtype)
    out, lse = attend_latents(call._replace(q_latent=stored[0], q_rope=stored[1], sm_scale=scale))
    if q_latent.ndim == 4:
        seq_lens = visible_tokens(seq_lens, call.q_lens, q_latent.shape[1])
    is_empty = (seq_lens == 0)[..., None]  # they get zeros, not the offset
    out = basis.k.restore(out).masked_fill(is_empty[..., None], 0).to(q_latent.dtype)
    if lse is None:
        return out, None
    missing = basis.k.missing_score(q_latent) + basis.v.missing_score(q_rope)
    return out, lse.add(missing, alpha=sm_scale).masked_fill(is_empty, -torch.inf)


def _attend(call: LatentCall) -> Result:
    backend = kernels_for(call.q_latent, call.backend)
    if backend == "cuda" and not debug.enabled:
        check = functools.partial(_checked, call)
        try:
            return _attend_cuda(call, check)
        except WRONG_TYPES:
            check()
            raise
    q, q_lens, sm_scale = _joined(call), call.q_lens, call.sm_scale

    def check_values(given: AttentionCall | None = None) -> AttentionCall | None:
        _checked(call)
        if not is_rehearsed(q):
            check_segment_values(call.all_segments)
            if q_lens is not None:
                check_q_len_values(q, q_lens)
        return given

    def attend(q: torch.Tensor, rows: Sequence[Segment], *of_own: Any) -> State:
        lens, check = of_own or (None, None)
        if backend == "cpu":
            given = AttentionCall(q, rows, sm_scale, call.num_splits, q_lens=lens)
            return cpu_kernel()(given, check)
        return reference_over_segments(q, rows, sm_scale, lens)

    if backend != "cpu":
        check_values()
    if backend == "cuda":
        return _attend_cuda(call)
    out, lse = attend(q, call.segments, q_lens, check_values)
    if call.prefix is not None:
        out, lse = _add_prefix(q, (out, lse), call.prefix, q_lens, attend)
    return out.to(q.dtype), lse.float() if call.return_lse else None


def _add_prefix(
    q: torch.Tensor,
    own: State,
    prefix: LatentPrefix,
    q_lens: torch.Tensor | None,
    attend: Callable[..., State],
) -> State:
    """Merge attention over a prefix into the states of sequences that share it."""
    sharing = prefix.shares.nonzero()[:, 0]
    if not len(sharing):
        return own
    mine = q[sharing]
    # heads of one query of one sequence
    out, lse = attend(mine.reshape(1, -1, mine.shape[-1]), [prefix.rows])
    out, lse = out.view(*mine.shape[:-1], out.shape[-1]), lse.view(mine.shape[:-1])
    if q_lens is not None:
        row = torch.arange(q.shape[1], device=q.device)
        lse = lse.masked_fill((row >= q_lens[sharing, None])[..., None], -torch.inf)
    merged = merge_states((own[0][sharing], own[1][sharing]), (out, lse))
    whole = [x.index_copy(0, sharing, y.to(x.dtype)) for x, y in zip(own, merged, strict=True)]
    return whole[0], whole[1]


def _attend_cuda(call: LatentCall, check: Callable[[], object] | None = None) -> Result:
    """Attend by the launcher, which calls check once for all calls of a kind."""
    q_latent, q_rope = call.q_latent.detach(), call.q_rope.detach()
    is_single = q_latent.ndim == 3
    if check is not None and (
        q_rope.ndim != q_latent.ndim or (is_single and call.q_lens is not None)
    ):
        check()  # it raises
    if is_single:
        q_latent, q_rope = q_latent.unsqueeze(1), q_rope.unsqueeze(1)
    out, lse = _cuda_kernel()(call._replace(q_latent=q_latent, q_rope=q_rope), check)
    if is_single:
        return out[:, 0], lse if lse is None else lse[:, 0]
    return out, lse


def _checked(call: LatentCall) -> torch.Tensor:
    """The joined queries, checked with the rows; the values of all tensors lie in memory."""
    given = {"q_latent": call.q_latent, "q_rope": call.q_rope}
    check_readable(**given, **({} if call.q_lens is None else {"q_lens": call.q_lens}))
    segment = call.segments[0]
    table = {} if segment.block_table is None else {"block_table": segment.block_table}
    check_readable(rows=segment.k_rows, seq_lens=segment.seq_lens, **table)
    return _query(call)


def check_kernels(formats: Sequence[LatentFormat], query: str = "bf16") -> None:
    """Raise UnsupportedError unless CUDA reads these formats with "bf16" or "fp16" queries."""
    for fmt in formats:
        _check_kernel(fmt, query)


@functools.cache
def _check_kernel(fmt: LatentFormat, query: str) -> None:
    from ..kernels.cuda.mla.mma.spec import MlaSpec

    MlaSpec(*fmt.parts, query)


def check_call(
    q_latent: torch.Tensor,
    formats: Sequence[LatentFormat],
    sm_scale: float | None,
    backend: str | None,
) -> None:
    """Raise unless attend_latents can take these queries."""
    scale = _scale_of(sm_scale)
    if kernels_for(q_latent, backend) == "cuda" and not torch.compiler.is_compiling():
        from ..kernels.cuda.decode.arrange import codec_of, log2_scale

        log2_scale(scale)
        check_kernels(formats, codec_of("q_latent", q_latent))


def _scale_of(sm_scale: float | None) -> float:
    if sm_scale is None:
        raise ConfigError("sm_scale is None: give the model's, latents do not tell it")
    return check_scale(sm_scale)


def check_queries(q_latent: torch.Tensor, q_rope: torch.Tensor, fmt: LatentFormat) -> None:
    """Raise unless the shapes, dtypes and devices of queries fit one another and the format."""
    check_tensor("q_latent", q_latent, FLOATS)
    check_tensor("q_rope", q_rope, [q_latent.dtype])
    check_same_device(q_latent=q_latent, q_rope=q_rope)
    fits = q_latent.ndim in (3, 4) and q_latent.shape[:-1] == q_rope.shape[:-1]
    if not fits or (q_latent.shape[-1], q_rope.shape[-1]) != (fmt.latent_dim, fmt.rope_dim):
        raise ShapeError(
            f"q_latent is {list(q_latent.shape)} and q_rope {list(q_rope.shape)}: they must be "
            f"[batch, num_heads, {fmt.latent_dim}] and [batch, num_heads, {fmt.rope_dim}], or both "
            "with an axis of queries, [batch, q_len, num_heads, ...]"
        )


def _joined(call: LatentCall) -> torch.Tensor:
    """Check the queries and join their parts: [..., latent_dim + rope_dim]."""
    fmt = call.segments[0].k_format
    assert isinstance(fmt, LatentFormat)
    check_queries(call.q_latent, call.q_rope, fmt)
    return torch.cat([call.q_latent.detach(), call.q_rope.detach()], dim=-1)


def _query(call: LatentCall) -> torch.Tensor:
    """The joined queries, checked with the segments."""
    q = _joined(call)
    check_segments(q, call.segments, call.q_lens)
    return q


@functools.cache
def _cuda_kernel() -> Callable[..., Result]:
    from ..kernels.cuda.mla.launch import attend
    from ..kernels.cuda.runtime.compile import require_extra

    require_extra()
    return attend


def _op_call(q_latent: torch.Tensor, q_rope: torch.Tensor, *args: Any) -> LatentCall:
    """The call from the arguments of the op; a prefix is the first segment."""
    *fields, q_lens, shares, sm_scale, return_lse, num_splits, backend = args
    dims = int(q_latent.shape[-1]), int(q_rope.shape[-1])
    segments = [
        latent_segment(rows, seq_lens, LatentFormat.parse(name, *dims), *others)
        for rows, seq_lens, name, *others in zip(*fields, strict=True)
    ]
    prefix = None if shares is None else LatentPrefix(segments.pop(0), shares)
    options = sm_scale, num_splits, return_lse, q_lens, prefix, backend
    return LatentCall(q_latent, q_rope, segments, *options)


def _attend_op(*args: Any) -> list[torch.Tensor]:
    out, lse = _attend(_op_call(*args))
    return [out] if lse is None else [out, lse]


def _attend_fake(q_latent: torch.Tensor, *args: Any) -> list[torch.Tensor]:
    call = _op_call(q_latent, *args)
    _query(call)
    out = torch.empty_like(q_latent, memory_format=torch.contiguous_format)
    lse = q_latent.new_empty(q_latent.shape[:-1], dtype=torch.float32)
    return [out, lse] if call.return_lse else [out]


attend_latents_op = torch_op("attend_latents", ATTEND_LATENTS, _attend_op, _attend_fake)
