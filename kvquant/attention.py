"""The fused attention call: checks, choice of the kernel; and the merge of partial results."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .errors import ConfigError, DeviceError, ShapeError, UnsupportedError
from .layout import RowFormat
from .quant import FLOAT_DTYPES
from .reference import reference_over_segments
from .segments import Segment, check_query, check_segments, make_segment

State = tuple[torch.Tensor, torch.Tensor]
BACKENDS = ("cpu", "cuda", "reference")


def decode_attention(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    k_format: str | RowFormat,
    v_format: str | RowFormat,
    sm_scale: float | None = None,
    return_lse: bool = False,
    num_splits: int | None = None,
    backend: str | None = None,
) -> torch.Tensor | State:
    """Attend one new token of each sequence to packed rows, dequantizing on the way.

    No dequantized copy of the cache is made. Query head h reads KV head h // (num_q_heads /
    num_kv_heads).

    Args:
        q: [batch, num_q_heads, head_dim], float32, bfloat16 or float16; num_q_heads is a multiple
            of num_kv_heads, in any ratio.
        k_rows: [batch, num_kv_heads, capacity, row bytes of k_format], uint8. Rows are contiguous,
            the other axes may have any strides.
        v_rows: [batch, num_kv_heads, capacity, row bytes of v_format], uint8, likewise.
        seq_lens: [batch], int32: rows in use, the first ones; the rest is not read.
        k_format: format of k_rows, or its short name ("int4-g4").
        v_format: format of v_rows, or its short name (then of the head_dim of q).
        sm_scale: factor on q·k; 1 / sqrt(head_dim) when None.
        return_lse: return the log-sum-exp of the scaled scores as well.
        num_splits: parts the tokens are cut into, at least; chosen from the work when None.
        backend: "cpu" or "cuda" (numba), or "reference" (float64 torch, slow); by the device of q
            when None.

    Returns:
        out [batch, num_q_heads, head_dim of v_format], the dtype of q; with return_lse also lse
        [batch, num_q_heads], float32, base e. A sequence of length 0 gives zeros and lse -inf.

    Raises:
        ShapeError: the tensors do not fit one another, or a length is over the capacity.
        ConfigError: a dtype, a format or the backend does not exist.
        DeviceError: the tensors lie on different devices, or none of the backends serves theirs.
    """
    segment = make_segment(q, k_rows, v_rows, seq_lens, k_format, v_format)
    return attend_segments(
        q,
        [segment],
        sm_scale=sm_scale,
        return_lse=return_lse,
        num_splits=num_splits,
        backend=backend,
    )


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
    check_query(q)
    if q.dtype not in FLOAT_DTYPES:
        raise ConfigError(f"q is {q.dtype}: use float32, bfloat16 or float16")
    if num_splits is not None and (type(num_splits) is not int or num_splits < 1):
        raise ConfigError(
            f"num_splits {num_splits} is not possible: use a whole number from 1, or None"
        )
    check_segments(q, segments)
    q = q.detach()
    sm_scale = q.shape[-1] ** -0.5 if sm_scale is None else float(sm_scale)
    attend = _choose_kernel(q, backend)
    out, lse = attend(q, segments, sm_scale, num_splits)
    out = out.to(q.dtype)
    return (out, lse.float()) if return_lse else out


def merge_states(*states: State) -> State:
    """Merge attention over disjoint sets of tokens into attention over all of them, exactly.

    Args:
        states: pairs of out [..., head_dim] and lse [...], base e, as decode_attention returns
            them; lse -inf marks a state without tokens, whose out does not matter.

    Returns:
        out, the dtype of the first one, and lse, float32 (float64 if any lse is). Computed in the
        dtype of lse. Where no state has tokens: zeros and -inf.

    Raises:
        ShapeError: no state, or states that do not fit one another.

    Source: the attention states of FlashInfer (https://arxiv.org/abs/2501.01005), there in base 2.
    """
    if not states:
        raise ShapeError("merge_states needs at least one (out, lse)")
    first_out = states[0][0]
    for out, lse in states:
        if out.shape != first_out.shape or lse.shape != out.shape[:-1]:
            raise ShapeError(
                f"out {list(out.shape)} with lse {list(lse.shape)} cannot be merged with out "
                f"{list(first_out.shape)}: outs must be alike, and lse an out without its last axis"
            )
    lses = torch.stack([lse if lse.dtype == torch.float64 else lse.float() for _, lse in states])
    lse = lses.logsumexp(0)
    weights = (lses - lse.nan_to_num(neginf=0.0)).exp()  # all empty: exp(-inf - 0) = 0
    outs = torch.stack([out.to(lses.dtype) for out, _ in states])
    parts = torch.where(lses[..., None] == -torch.inf, 0.0, weights[..., None] * outs)
    return parts.sum(0).to(first_out.dtype), lse


Kernel = Callable[[torch.Tensor, Sequence[Segment], float, "int | None"], State]


def _choose_kernel(q: torch.Tensor, backend: str | None) -> Kernel:
    if backend is None:
        backend = q.device.type
        if backend not in ("cpu", "cuda"):
            raise DeviceError(
                f"no fused kernel serves {q.device}: move the tensors to the CPU or to CUDA, or "
                "pass backend='reference' for the slow float64 one"
            )
    if backend == "cuda":
        if q.device.type != "cuda":
            raise DeviceError(f"backend 'cuda' takes CUDA tensors, not {q.device}")
        return _load_cuda()
    if backend == "cpu":
        if q.device.type != "cpu":
            raise DeviceError(f"backend 'cpu' takes CPU tensors, not {q.device}")
        from .kernels.cpu.decode import attend

        return attend
    if backend == "reference":
        return lambda q, segments, sm_scale, _: reference_over_segments(q, segments, sm_scale)
    raise ConfigError(f"backend {backend!r} does not exist: use {' or '.join(BACKENDS)}")


def _load_cuda() -> Kernel:
    try:
        import numba_cuda  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            "CUDA tensors need numba-cuda: install kvquant with its cuda extra, pip install -e "
            f"'.[cuda]' in the checkout ({error}); or pass backend='reference' for the slow kernel"
        ) from error
    from .kernels.cuda.launch import attend

    return attend
