"""Rows at slots: copied, put, and dequantized by torch.ops.kvquant.dequantize_pages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .. import debug
from ..errors import ConfigError, ShapeError
from ..rows.arguments import check_readable, check_same_device
from ..rows.format import RowFormat
from ..rows.latent import AnyFormat, parse_any
from ..rows.quantize import check_dtype, check_format, format_of
from .append_checks import check_contiguous, check_pages
from .dispatch import kernels_for, torch_op
from .quantize import dequantize_rows
from .slots import check_existing

DEQUANTIZE_PAGES = "(Tensor rows, str fmt, Tensor slots, Tensor(a!) out, str? backend) -> ()"


def dequantize_pages(
    rows: torch.Tensor,
    fmt: str | AnyFormat,
    slots: torch.Tensor,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """Give back the values of the rows at slots.

    Args:
        rows: [num_pages, num_kv_heads, page_size, row_bytes], uint8, as in append_rows.
        fmt: the format that they were written in, or its short name; a LatentFormat gives the
            latent, then the RoPE part (on CUDA by torch).
        slots: [num_tokens], int64, contiguous: page * page_size + place in the page; a negative one
            gives zeros.
        dtype: float32, bfloat16 or float16; values are computed in float32 and rounded once.
        out: where to write: [num_tokens, num_kv_heads, head_dim], dtype, contiguous; new when None.
        backend: as in append_rows.

    Returns:
        out.

    Raises:
        As append_rows.

    Example:
        >>> import torch
        >>> from kvquant import dequantize_pages, quantize_rows
        >>> pages = quantize_rows(torch.ones(2, 8, 16, 128), "int4")  # 2 pages of 16 rows
        >>> dequantize_pages(pages, "int4", torch.tensor([31, -1]), torch.float32)[:, 0, 0]
        tensor([1., 0.])
    """
    check_readable(rows=rows, slots=slots)
    found = format_of(rows, fmt)
    check_format(found)
    check_dtype(dtype)
    if rows.ndim != 4 or slots.ndim != 1:
        raise ShapeError(
            f"rows is {list(rows.shape)} and slots {list(slots.shape)}: they must be [num_pages, "
            "num_kv_heads, page_size, row_bytes] and [num_tokens]"
        )
    if out is None:
        shape = slots.shape[0], rows.shape[1], found.head_dim
        out = torch.empty(shape, dtype=dtype, device=rows.device)
    else:
        check_readable(out=out)
        if out.dtype != dtype:
            raise ConfigError(f"out is {out.dtype}, dtype {dtype}: give an out of this dtype")
    if torch.compiler.is_compiling():
        dequantize_pages_op(rows, str(found), slots, out, backend)
    else:
        _dequantize(rows, found, slots, out, backend)
    return out


def _dequantize(
    rows: torch.Tensor, fmt: AnyFormat, slots: torch.Tensor, out: torch.Tensor, backend: str | None
) -> None:
    backend = kernels_for(rows, backend)
    # latent rows and their parts have none
    has_kernel = isinstance(fmt, RowFormat) and fmt.is_of_heads
    if backend == "cuda" and has_kernel and not debug.enabled:
        # the launcher checks only calls it has not seen
        check = functools.partial(check_dequantize, rows, fmt, slots, out)
        _dequantize_cuda()(rows, fmt, slots, out, check=check)
        return
    check_dequantize(rows, fmt, slots, out)
    if debug.may_read(slots):
        check_existing("slots", slots, rows.shape[0] * rows.shape[2])
    if backend == "cuda" and has_kernel:
        _dequantize_cuda()(rows, fmt, slots, out)
        return
    if backend == "cuda" and rows.numel():  # as the kernel, without waiting for the GPU
        used = (slots >= 0) & (slots < rows.shape[0] * rows.shape[2])
        values = dequantize_rows(take(rows, torch.where(used, slots, 0)), fmt, out.dtype)
        out.copy_(values.masked_fill(~used[:, None, None], 0))
        return
    used = slots >= 0
    values = dequantize_rows(take(rows, slots[used]), fmt, out.dtype, backend=backend)
    if len(values) < len(out):
        out.zero_()
    out[used] = values


@functools.cache
def _dequantize_cuda() -> Callable[..., None]:
    from ..kernels.cuda.dequantize.launch import dequantize

    return dequantize


def take(storage: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Copy the rows at slots: [slots, num_kv_heads, row_bytes]."""
    page_size = max(storage.shape[2], 1)
    return _widest(storage)[slots // page_size, :, slots % page_size].view(torch.uint8)


def put(storage: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows as `take` gives them."""
    page_size, wide = max(storage.shape[2], 1), _widest(storage)
    flat = rows.flatten().view(wide.dtype)  # view looks at strides of axes of size 1, too
    wide[slots // page_size, :, slots % page_size] = flat.view(*rows.shape[:2], wide.shape[-1])


def _widest(rows: torch.Tensor) -> torch.Tensor:
    """The same bytes as the largest possible numbers: indexing takes time by the number."""
    numbers = rows.shape[-1] | int(rows.storage_offset()) | rows.data_ptr()
    for stride in rows.stride()[:-1]:
        numbers |= stride
    dtypes = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    return rows.view(dtypes[min(numbers & -numbers, 8)])


def check_dequantize(
    rows: torch.Tensor, fmt: AnyFormat, slots: torch.Tensor, out: torch.Tensor
) -> None:
    """Raise as check_append unless the rows at slots can be dequantized into out."""
    check_pages("rows", rows, fmt)
    check_contiguous("slots", slots, torch.int64, tuple(slots.shape))
    check_contiguous("out", out, out.dtype, (slots.shape[0], rows.shape[1], fmt.head_dim))
    check_same_device(rows=rows, slots=slots, out=out)


def _op_arguments(rows: torch.Tensor, name: str, *others: Any) -> tuple[Any, ...]:
    """The arguments of check_dequantize and the backend, from the op's."""
    slots, out, backend = others
    return rows, parse_any(name, int(out.shape[-1])), slots, out, backend


def _dequantize_op(*args: Any) -> None:
    _dequantize(*_op_arguments(*args))


def _dequantize_fake(*args: Any) -> None:
    check_dequantize(*_op_arguments(*args)[:-1])


dequantize_pages_op = torch_op(
    "dequantize_pages", DEQUANTIZE_PAGES, _dequantize_op, _dequantize_fake
)
