"""Kernels that are loaded, by GPU, and calls that are settled: what launches share.

A call is settled by its shapes, strides, formats and dtypes: that it is possible, the kernel, the
arguments that stay. The next call like it finds that in a dictionary, packs the addresses and
launches: no host synchronization; safe in CUDA graphs and from several threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from kvquant.errors import ConfigError, UnsupportedError
from kvquant.rows.format import RowFormat

from ..affine.spec import TurnSpec
from ..append.feedback_spec import FeedbackSpec
from ..device.row_spec import UNIT, AppendSpec, DequantizeSpec, divisor, unit_of
from ..prefix.combine_spec import MergeSpec
from ..prefix.spec import PrefixSpec
from ..slots.spec import SlotSpec
from .compile import load_cubin
from .driver import Kernel

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
Result = TypeVar("Result")
Tensors = Sequence["torch.Tensor | None"]
Ready = tuple[int, Callable[[Tensors], None], Tensors]  # what launch_on takes


class GPU(NamedTuple):
    """What launches need to know of a GPU."""

    arch: str
    converts_fp8: bool
    num_sms: int
    shared_of_sm: int  # bytes
    shared_of_block: int


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
                    f"{capability[1]}: pass backend='reference' for the slow way"
                )
            facts = torch.cuda.get_device_properties(tensor.device)
            _gpus[index] = GPU(
                f"sm_{capability[0]}{capability[1]}",
                capability >= FP8_CAPABILITY,
                facts.multi_processor_count,
                facts.shared_memory_per_multiprocessor,
                facts.shared_memory_per_block_optin,  # type: ignore[attr-defined]
            )
        return _gpus[index]


def kernel_of(
    spec: AppendSpec | DequantizeSpec | MergeSpec | FeedbackSpec | PrefixSpec | SlotSpec | TurnSpec,
    tensor: torch.Tensor,
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


def unaligned(tensors: Tensors, new: Sequence[int], others: Sequence[int]) -> list[int]:
    """Which of the new rows, and of the other tensors, a kernel cannot read 16 bytes at a time
    where they are."""
    found = []
    for i in (*new, *others):
        x = tensors[i]
        if x is not None:
            steps = strides(x) if i in new else []  # the others are contiguous
            if x.is_neg() or any(n % UNIT for n in (x.data_ptr(), *steps)):
                found.append(i)
    return found


def with_copies(tensors: Tensors, copied: Sequence[int]) -> Tensors:
    """Tensors, those that are named as contiguous copies."""
    if not copied:
        return tensors
    tensors = list(tensors)
    for i in copied:
        x = tensors[i]
        assert x is not None
        tensors[i] = aligned_copy(x)
    return tensors


def aligned_copy(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy, which begins at a multiple of 16 bytes."""
    return x.detach().resolve_neg().clone(memory_format=torch.contiguous_format)


def side_strides(
    name: str,
    fmt: RowFormat,
    exact_codec: str,
    x: torch.Tensor,
    rows: torch.Tensor,
    exact_rows: torch.Tensor | None,
    is_copied: bool,
) -> list[int]:
    """Bytes between new rows, between rows and between 16-bit rows; errors as of check_pages."""
    check_pages(f"{name}_rows", rows, fmt)
    exact_strides = [0, 0, 0]
    if exact_rows is not None:
        check_pages(f"exact_{name}", exact_rows, RowFormat(exact_codec, 1, fmt.head_dim))
        exact_strides = strides(exact_rows)
    row_bytes = x.shape[2] * x.element_size()
    x_strides = [x.shape[1] * row_bytes, row_bytes] if is_copied else strides(x)
    return [*x_strides, *strides(rows), *exact_strides]


def launch_on(index: int, launch: Callable[..., Result], *arguments: Any) -> Result:
    """Launch on the current stream of a device."""
    if index == current_device():
        return launch(*arguments)
    with torch.cuda.device(index):
        return launch(*arguments)


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
