"""Quantize and dequantize rows by the kernels of their device; see rows/quantize.py for formats."""

from __future__ import annotations

import functools
from types import ModuleType

import torch

from ..errors import ShapeError
from ..rows.arguments import FLOATS, check_flag, check_readable, check_tensor
from ..rows.format import RowFormat
from ..rows.latent import AnyFormat
from ..rows.quantize import (
    check_dtype,
    check_format,
    check_rows,
    clip_rows,
    dequantize,
    format_of,
    non_finite,
    pack,
    quantize,
    round_with_feedback,
)
from ..rows.segment import Segment
from .dispatch import kernels_for


def quantize_rows(
    x: torch.Tensor, fmt: str | AnyFormat, *, check: bool = True, backend: str | None = None
) -> torch.Tensor:
    """Quantize the last axis of a tensor to rows.

    Args:
        x: [..., head_dim], float32, bfloat16 or float16, of any strides; on the CPU or CUDA, or
            with backend="reference" on any device.
        fmt: the format of the rows, or its short name ("int4-g4"); with a LatentFormat x is the
            latent, then the RoPE part.
        check: raise if there is a value that the format cannot hold (NaN, Inf, magnitudes over
            fmt.max_abs). With False its row, or its part of a latent row, decodes to NaN.
        backend: "cpu" (numba), "cuda" (torch on CUDA) or "reference" (plain torch), all with
            equal bytes; by device when None.

    Returns:
        [..., row_bytes], uint8, contiguous, on the device of x.

    Raises:
        ShapeError: the last axis is not head_dim.
        ConfigError: the dtype or the backend does not exist here.
        NonFiniteError: the first value that the format cannot hold, with its index.
        DeviceError: the backend cannot take tensors of this device.

    Example:
        >>> import torch
        >>> from kvquant import quantize_rows
        >>> quantize_rows(torch.randn(2, 8, 10, 128), "int4-g4").shape  # 80 bytes a row
        torch.Size([2, 8, 10, 80])
    """
    check_readable(x=x)
    check_flag("check", check)
    if isinstance(fmt, str):
        fmt = RowFormat.parse(fmt, x.shape[-1] if x.ndim else 0)
    check_format(fmt)
    check_tensor("x", x, FLOATS)
    if x.ndim < 1 or x.shape[-1] != fmt.head_dim:
        raise ShapeError(f"x is {list(x.shape)}: its last axis must be head_dim {fmt.head_dim}")
    x = x.detach()
    rows: torch.Tensor
    if kernels_for(x, backend) == "cpu":
        rows, holdable = _cpu().quantize(x, fmt)
    else:
        rows, holdable = quantize(x, fmt)
    if check and not holdable:  # on CUDA the host waits here
        raise non_finite(x, fmt)
    return rows


def dequantize_rows(
    rows: torch.Tensor,
    fmt: str | AnyFormat,
    dtype: torch.dtype = torch.float32,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """Give back the values of rows.

    Args:
        rows: [..., row_bytes], uint8, of any strides; devices as in quantize_rows.
        fmt: the format that they were written in, or its short name.
        dtype: float32, bfloat16 or float16; values are computed in float32 and rounded once.
        backend: as in quantize_rows, with equal values.

    Returns:
        [..., head_dim], dtype, contiguous, on the device of rows.

    Raises:
        ShapeError: the last axis is not row_bytes.
        ConfigError: the dtype or the backend does not exist here.
        DeviceError: the backend cannot take tensors of this device.

    Example:
        >>> import torch
        >>> from kvquant import RowFormat, dequantize_rows, quantize_rows
        >>> int8 = RowFormat.parse("int8", 128)
        >>> x = torch.randn(10, 128)
        >>> bool((dequantize_rows(quantize_rows(x, int8), int8) - x).abs().max() < 0.05)
        True
    """
    fmt = format_of(rows, fmt)
    check_rows(rows, fmt)
    check_dtype(dtype)
    if kernels_for(rows, backend) == "cpu":
        values: torch.Tensor = _cpu().dequantize(rows, fmt)
        return values.to(dtype)
    return dequantize(rows, fmt).to(dtype)


def dequantize_segment(
    segment: Segment, sequence: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one sequence in token order: [num_kv_heads, seq_len, head_dim]."""
    k = dequantize_rows(segment.rows(sequence, "k"), segment.k_format, dtype)
    return k, dequantize_rows(segment.rows(sequence, "v"), segment.v_format, dtype)


def quantize_calibrated(
    x: torch.Tensor,
    fmt: RowFormat,
    *,
    clip: torch.Tensor | None = None,
    feedback: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Quantize rows with a clip ratio and feedback for each KV head; they fit x.

    Args:
        x: [batch, num_kv_heads, tokens, head_dim], float32, bfloat16 or float16.
        fmt: the format of the rows; clip and feedback concern integer codes only.
        clip: [num_kv_heads], float32: share of its range that a group keeps; None for all.
        feedback: [num_kv_heads, head_dim, head_dim], float32, from feedback_matrix; None for the
            nearest codes.
        backend: as in quantize_rows; on CUDA feedback is one launch, not about 800 of torch.

    Returns:
        [batch, num_kv_heads, tokens, row_bytes], uint8; a row with a value that the format cannot
        hold decodes to NaN.

    Raises:
        UnsupportedError: feedback on CUDA without the cuda extra, or on too old a GPU.
    """
    if not fmt.facts.is_integer or (clip is None and feedback is None) or not x.numel():
        return quantize_rows(x, fmt, check=False, backend=backend)
    backend = kernels_for(x, backend)
    if feedback is not None and backend == "cuda":
        from ..kernels.cuda.append.launch import quantize_with_feedback

        return quantize_with_feedback(x, fmt, clip, feedback)
    x = x.float()
    inside = x
    if clip is not None:  # what was too large must not look as if it were not
        holdable = (x.abs() <= fmt.max_abs).all(-1, keepdim=True)
        inside = torch.where(holdable, clip_rows(x, fmt.groups, clip), torch.nan)
    rows = quantize_rows(inside, fmt, check=False, backend=backend)
    if feedback is None:
        return rows
    params = rows[..., : fmt.header_bytes].contiguous().view(torch.float16).float()
    params = params.unflatten(-1, (fmt.groups, 2))
    levels = fmt.facts.levels
    if backend == "cpu":
        from ..kernels.cpu.feedback import round_with_feedback as round_on_cpu

        codes = round_on_cpu(x, params, feedback, levels)
    else:
        codes = round_with_feedback(x, params, feedback, levels)
    codes = pack(codes.nan_to_num().to(torch.uint8), fmt)
    is_nan = params[..., :1, 0].isnan()
    rows[..., fmt.header_bytes :] = torch.where(is_nan, 0, codes)
    return rows


@functools.cache
def _cpu() -> ModuleType:
    from ..kernels.cpu import rows

    return rows
