"""Tensors as kernels take them: facts of a launch, strides in bytes, aligned copies, pages."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import NoReturn

import torch

from kvquant.errors import ConfigError, UnsupportedError
from kvquant.rows.format import RowFormat

from ..device.row_layout import UNIT, divisor, unit_of

MOST_SLOTS = 1 << 31  # the kernels divide them as 31 bits
Tensors = Sequence["torch.Tensor | None"]


def facts_of(tensor: torch.Tensor | None) -> Hashable:
    """All of a tensor that a launch may depend on, but for where it lies."""
    if tensor is None:
        return None
    address = tensor.data_ptr()
    return (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.get_device(),
        address % UNIT if address else None,  # nowhere, as where storage was freed: a check says so
    )


def strides(x: torch.Tensor, is_copied: bool = False) -> list[int]:
    """Bytes from one to the next along the axes but the last, of x or of a contiguous copy; 0 where
    there is only one."""
    sizes, steps = x.shape[:-1], x.stride()[:-1]
    if is_copied:
        steps = tuple(math.prod(x.shape[i:]) for i in range(1, x.ndim))
    return [x.element_size() * step * (n > 1) for n, step in zip(sizes, steps, strict=True)]


def is_readable(x: torch.Tensor, unit: int, is_contiguous: bool = False) -> bool:
    """Whether a kernel can read rows where they are, so many bytes at a time."""
    steps = [] if is_contiguous else strides(x)
    return not (x.is_neg() or any(n % unit for n in (x.data_ptr(), *steps)))


def with_copies(tensors: Tensors, copied: Iterable[int]) -> Tensors:
    tensors = list(tensors)
    for i in copied:
        x = tensors[i]
        assert x is not None
        tensors[i] = aligned_copy(x)
    return tensors


def aligned_copy(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy, which begins at a multiple of 16 bytes."""
    return x.detach().resolve_neg().clone(memory_format=torch.contiguous_format)


def refuse_rows(name: str, rows: torch.Tensor, wanted: str) -> NoReturn:
    """Raise ConfigError: no kernel can read rows where they are."""
    raise ConfigError(
        f"{name}: {wanted} on CUDA, these start {rows.data_ptr() % UNIT} bytes after a multiple of "
        f"{UNIT} and have strides {list(rows.stride())}. Allocate them apart"
    )


def check_pages(name: str, rows: torch.Tensor, fmt: RowFormat) -> None:
    """Raise unless a kernel can take pages [num_pages, num_kv_heads, page_size, row_bytes]:
    ConfigError if rows are not aligned, UnsupportedError if there are too many slots."""
    unit = unit_of(fmt)
    if any(n % unit for n in (rows.data_ptr(), *(strides(rows)))):
        wanted = f"rows of {fmt} with head_dim {fmt.head_dim} must be aligned to {unit} bytes"
        refuse_rows(name, rows, wanted)
    if rows.shape[0] * rows.shape[2] >= MOST_SLOTS:
        raise UnsupportedError(
            f"{name} {list(rows.shape)} has {rows.shape[0] * rows.shape[2]} slots: the CUDA kernel "
            f"takes fewer than {MOST_SLOTS}. Use several pools"
        )


def page_arguments(rows: torch.Tensor) -> dict[str, int]:
    """How a kernel finds the row of a slot: strides, the number of slots, and the divisor."""
    page, head, row = strides(rows)
    page_size = max(rows.shape[2], 1)
    factor, shift = divisor(page_size)
    return {
        "stride_page": page,
        "stride_head": head,
        "stride_row": row,
        "num_slots": rows.shape[0] * rows.shape[2],
        "page_size": page_size,
        "page_factor": factor,
        "page_shift": shift,
    }
