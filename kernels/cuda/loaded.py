"""Kernels that are loaded, by GPU, and calls that are settled: what launches share.

A call is settled by its shapes, strides, formats and dtypes: that it is possible, the kernel, the
arguments that stay. The next call like it finds that in a dictionary, packs the addresses and
launches: no host synchronization; safe in CUDA graphs and from several threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch

from kvquant.errors import ConfigError, UnsupportedError
from kvquant.layout import RowFormat

from .compile import load_cubin
from .driver import Kernel
from .feedbackspec import FeedbackSpec
from .rowspec import UNIT, AppendSpec, DequantizeSpec, divisor, unit_of
from .statespec import MergeSpec

MOST_SETTLED = 4096  # calls that are remembered
MOST_SLOTS = 1 << 31  # the kernels divide them as 31 bits
BLOCKS_PER_SM = 32  # more blocks walk over fewer heads each: a few waves, so that the last is short
FP8_CAPABILITY = (8, 9)

# not in torch without CUDA
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_lock = threading.RLock()
_gpus: dict[int, GPU] = {}
_kernels: dict[Hashable, Kernel] = {}
Launch = TypeVar("Launch")


class GPU(NamedTuple):
    """What launches need to know of a GPU."""

    arch: str
    converts_fp8: bool
    num_sms: int


def gpu_of(tensor: torch.Tensor) -> GPU:
    """The GPU that a tensor lies on.

    Raises:
        UnsupportedError: it is too old.
    """
    index = tensor.get_device()
    with _lock:
        if index not in _gpus:
            capability = torch.cuda.get_device_capability(tensor.device)
            if capability < (8, 0):
                raise UnsupportedError(
                    "the CUDA kernels need compute capability 8.0 or newer (A100, RTX 30 and "
                    f"later), {torch.cuda.get_device_name(tensor.device)} has {capability[0]}."
                    f"{capability[1]}: pass backend='torch' for the slow way"
                )
            facts = torch.cuda.get_device_properties(tensor.device)
            _gpus[index] = GPU(
                f"sm_{capability[0]}{capability[1]}",
                capability >= FP8_CAPABILITY,
                facts.multi_processor_count,
            )
        return _gpus[index]


def kernel_of(
    spec: AppendSpec | DequantizeSpec | MergeSpec | FeedbackSpec, tensor: torch.Tensor
) -> Kernel:
    """A kernel on the GPU of a tensor, compiled if need be."""
    arch, index = gpu_of(tensor).arch, tensor.get_device()
    with _lock:
        if (spec, index) not in _kernels:
            cubin = load_cubin(spec, arch)
            _kernels[spec, index] = Kernel(
                cubin.code, cubin.name, index, threads=spec.threads, shared=spec.shared_bytes
            )
        return _kernels[spec, index]


def settle(
    settled: dict[Hashable, Launch], key: Hashable, make: Callable[..., Launch], *arguments: Any
) -> Launch:
    """Make a launch and remember it."""
    launch = make(*arguments)
    if len(settled) >= MOST_SETTLED:  # such as a number of tokens that is new in every call
        settled.clear()
    settled[key] = launch
    return launch


def grid_of(
    num_tokens: int, num_heads: int, sides: int, tokens: int, num_sms: int
) -> tuple[int, int, int]:
    """Blocks: of tokens, of heads, sides."""
    groups = -(-num_tokens // tokens)
    heads = min(max(groups * num_heads * sides // (num_sms * BLOCKS_PER_SM), 1), num_heads)
    return groups, -(-num_heads // heads), sides


def facts_of(tensor: torch.Tensor | None) -> Hashable:
    """All of a tensor that a launch may depend on, but for where it lies."""
    if tensor is None:
        return None
    return (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.get_device(),
        tensor.data_ptr() % UNIT,
    )


def check_pages(name: str, rows: torch.Tensor, fmt: RowFormat) -> None:
    """Raise unless a kernel can take pages [num_pages, num_kv_heads, page_size, row_bytes].

    Raises:
        ConfigError: rows are not aligned.
        UnsupportedError: there are too many slots.
    """
    unit = unit_of(fmt)
    if any(n % unit for n in (rows.data_ptr(), *(strides(rows)))):
        raise ConfigError(
            f"{name}: rows of {fmt} with head_dim {fmt.head_dim} must be aligned to {unit} bytes "
            f"on CUDA, these start {rows.data_ptr() % UNIT} bytes after a multiple of {UNIT} and "
            f"have strides {list(rows.stride())}. Allocate them apart"
        )
    if rows.shape[0] * rows.shape[2] >= MOST_SLOTS:
        raise UnsupportedError(
            f"{name} {list(rows.shape)} has {rows.shape[0] * rows.shape[2]} slots: the CUDA kernel "
            f"takes fewer than {MOST_SLOTS}. Use several pools"
        )


def strides(x: torch.Tensor) -> list[int]:
    """Bytes from one to the next along the axes but the last; 0 where there is only one."""
    sizes, steps = x.shape[:-1], x.stride()[:-1]
    return [x.element_size() * step * (n > 1) for n, step in zip(sizes, steps, strict=True)]


def slot_facts(rows: torch.Tensor) -> tuple[int, int, int, int]:
    """How slots are taken apart: their number, the page size, and its divisor."""
    page_size = max(rows.shape[2], 1)
    return rows.shape[0] * rows.shape[2], page_size, *divisor(page_size)
