"""Dispatch of the operations: the backend that serves a tensor, and custom ops of torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..errors import ConfigError, DeviceError, UnsupportedError, shown
from ..rehearsal import is_rehearsed
from ..rows.format import RowFormat

KERNELS = ("cpu", "cuda")  # devices, and the backends of their kernels
# What a call raises where an argument is no tensor, or one whose values lie nowhere in memory. To
# look at the types of all arguments takes a tenth of a call of attention. So a call is tried first:
# where it raises one of these, its types are checked, and only if they are right it goes on up.
WRONG_TYPES = AttributeError, TypeError, IndexError, RuntimeError


def kernels_for(tensor: torch.Tensor, backend: str | None) -> str:
    """The backend that serves a tensor, or the one asked for, checked.

    It raises ConfigError for an unknown backend, DeviceError if none serves the device.
    """
    device = "cuda" if is_rehearsed(tensor) else tensor.device.type
    if backend is None:
        if device not in KERNELS:
            raise DeviceError(
                f"no kernel serves {tensor.device}: move the tensors to the CPU or to CUDA, or "
                "pass backend='reference', which is slow"
            )
        return device
    if backend not in (*KERNELS, "reference"):
        raise ConfigError(f"backend {shown(backend)} does not exist: use cpu, cuda or reference")
    if backend not in (device, "reference"):
        raise DeviceError(
            f"backend {backend!r} takes {backend.upper()} tensors, not {tensor.device}: leave "
            "it out, or use 'reference', which is slow"
        )
    return backend


def check_cuda_codecs(formats: Iterable[RowFormat]) -> None:
    from ..kernels.cuda.device.row_layout import check_codec

    try:
        check_codec(*formats)
    except UnsupportedError as error:
        raise UnsupportedError(f"no CUDA kernel: {error}, or keep the rows on the CPU") from None


def check_cuda_pages(formats: Iterable[RowFormat], page_size: int) -> None:
    """Raise ConfigError unless pages of so many rows take multiples of 16 bytes for kernels."""
    for fmt in formats:
        if page_size * fmt.row_bytes % 16:
            least = 16 // math.gcd(fmt.row_bytes, 16)
            raise ConfigError(
                f"pages of {page_size} rows of {fmt} take {page_size * fmt.row_bytes} bytes, no "
                f"multiple of 16 as CUDA needs: use page_size {least} or more, or a format whose "
                "rows are a multiple of 16 bytes long"
            )


def torch_op(
    name: str, schema: str, call: Callable[..., Any], fake: Callable[..., Any]
) -> torch._ops.OpOverloadPacket:
    """Register torch.ops.kvquant.<name>, which torch.compile(fullgraph=True) takes as one node.

    Eager code calls `call` itself: the dispatcher takes a few microseconds.

    Args:
        schema: of its arguments and results; arguments that it writes are marked (a!).
        call: computes; takes the arguments by position.
        fake: checks shapes and dtypes in a trace, and makes results without values.
    """
    name = f"kvquant::{name}"
    # strides are kept: torch would copy a whole cache to make it contiguous
    torch.library.define(name, schema, tags=(torch.Tag.needs_fixed_stride_order,))
    torch.library.impl(name, "default", call)
    torch.library.register_fake(name, fake)
    op: torch._ops.OpOverloadPacket = getattr(torch.ops.kvquant, name.removeprefix("kvquant::"))
    return op
