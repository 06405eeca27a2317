"""Append on CUDA: one launch for K and V; see kvquant/append.py for the meaning."""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import torch

from kvquant.layout import RowFormat
from kvquant.slots import Slots
from kvquant.transforms import Rope, RowTransform

from .cuda.driver import Launcher
from .cuda.loaded import (
    check_pages,
    current_device,
    current_stream,
    facts_of,
    gpu_of,
    grid_of,
    kernel_of,
    settle,
    slot_facts,
    strides,
)
from .cuda.rowspec import APPEND, UNIT, AppendSpec, Side, side_arguments

SOURCES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# what stands after the addresses, in all arguments and in those of a side
COMMON = struct.Struct("=" + "".join(code for _, code in APPEND[6:]) + "4x")
SIDE = struct.Struct("=" + side_arguments()[4:])
# the tensors of a call in the order of their addresses: six, then four of K and four of V
COS, SIN, K, V = 3, 4, 6, 10
ROWS, EXACT, OFFSET = 1, 2, 3  # after K or V
NO_TRANSFORM = RowTransform()
Tensors = Sequence["torch.Tensor | None"]
_settled: dict[Hashable, AppendLaunch] = {}


def append(
    k: torch.Tensor,
    v: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    slots: Slots,
    k_format: RowFormat,
    v_format: RowFormat,
    exact_k: torch.Tensor | None = None,
    exact_v: torch.Tensor | None = None,
    exact_format: str = "bf16",
    k_transform: RowTransform | None = None,
    v_transform: RowTransform | None = None,
    rope: Rope | None = None,
    bad: torch.Tensor | None = None,
    check: Callable[[], None] | None = None,
) -> None:
    """Append on the current stream; see append.append_rows.

    Slots that do not exist are left out, like negative ones.

    Args:
        check: raises unless the arguments fit one another; called only before a call is settled.

    Raises:
        ConfigError: rows are not aligned.
        UnsupportedError: the GPU is too old, or there are too many slots.
        DeviceError: CUDA refuses the launch.
    """
    k_offset, k_rotate = k_transform or NO_TRANSFORM
    v_offset, v_rotate = v_transform or NO_TRANSFORM
    cos, sin, interleaved = rope or (None, None, False)
    tensors = (*slots, cos, sin, bad, k, k_rows, exact_k, k_offset, v, v_rows, exact_v, v_offset)
    # all that the check and the launch depend on
    key = (
        k_format,
        v_format,
        exact_format,
        k_rotate,
        v_rotate,
        interleaved,
        k.is_neg(),
        v.is_neg(),
        *map(facts_of, tensors),
    )
    launch = _settled.get(key)
    if launch is None:
        if check:
            check()
        if not k.numel():
            return
        spec = AppendSpec(
            Side(k_format, k_offset is not None, k_rotate),
            Side(v_format, v_offset is not None, v_rotate),
            SOURCES[k.dtype],
            "" if exact_k is None else exact_format,
            0 if cos is None else 2 * cos.shape[-1],
            interleaved,
        )
        launch = settle(_settled, key, AppendLaunch, spec, tensors)
    if k.get_device() == current_device():
        launch(tensors)
        return
    with torch.cuda.device(k.get_device()):
        launch(tensors)


class AppendLaunch:
    """A settled call: everything but addresses."""

    def __init__(self, spec: AppendSpec, tensors: Tensors) -> None:
        k, rows, exact = tensors[K], tensors[K + ROWS], tensors[K + EXACT]
        assert k is not None and rows is not None
        num_tokens, num_heads, _ = k.shape
        gpu = gpu_of(k)
        if "fp8" in (spec.k.fmt.codec, spec.v.fmt.codec):
            spec = replace(spec, converts_fp8=gpu.converts_fp8)
        grid = grid_of(num_tokens, num_heads, 2, spec.tokens, gpu.num_sms)
        exact_facts = (0, 0, 0, 0) if exact is None else slot_facts(exact)
        heads = -(-num_heads // grid[1])
        self._common = COMMON.pack(num_tokens, num_heads, heads, *slot_facts(rows), *exact_facts)
        self._copied = [i for i in (K, V) if _must_be_copied(tensors[i])]
        for i in (COS, SIN, K + OFFSET, V + OFFSET):  # read 16 bytes at a time
            tensor = tensors[i]
            if tensor is not None and tensor.data_ptr() % UNIT:
                self._copied.append(i)
        self._k = self._side_constants("k", spec.k, spec.exact, tensors[K:V], K in self._copied)
        self._v = self._side_constants("v", spec.v, spec.exact, tensors[V:], V in self._copied)
        self._index = k.get_device()
        layout = f"=6Q{COMMON.size}s4Q{SIDE.size}s4Q{SIDE.size}s"
        self._launch = Launcher(kernel_of(spec, k), grid, layout)

    def __call__(self, tensors: Tensors) -> None:
        """Launch on the current stream of the current device, which is that of the tensors."""
        if self._copied:
            tensors = list(tensors)
            for i in self._copied:
                tensors[i] = _copy(tensors[i])
        at: list[float | bytes] = [0 if one is None else one.data_ptr() for one in tensors]
        values = (*at[:K], self._common, *at[K:V], self._k, *at[V:], self._v)
        self._launch(current_stream(self._index), values)

    @staticmethod
    def _side_constants(
        name: str, side: Side, exact_codec: str, tensors: Tensors, is_copied: bool
    ) -> bytes:
        """The strides of K or of V."""
        x, rows, exact_rows, _ = tensors
        assert x is not None and rows is not None
        check_pages(f"{name}_rows", rows, side.fmt)
        exact_strides = [0, 0, 0]
        if exact_rows is not None:
            check_pages(f"exact_{name}", exact_rows, RowFormat(exact_codec, 1, side.fmt.head_dim))
            exact_strides = strides(exact_rows)
        row_bytes = x.shape[2] * x.element_size()
        x_strides = [x.shape[1] * row_bytes, row_bytes] if is_copied else strides(x)
        return SIDE.pack(*x_strides, *strides(rows), *exact_strides)


def _must_be_copied(x: torch.Tensor | None) -> bool:
    """Whether the kernel cannot read new rows 16 bytes at a time where they are."""
    assert x is not None
    return x.is_neg() or any(n % UNIT for n in (x.data_ptr(), *strides(x)))


def _copy(x: torch.Tensor | None) -> torch.Tensor:
    assert x is not None
    return x.detach().resolve_neg().clone(memory_format=torch.contiguous_format)
