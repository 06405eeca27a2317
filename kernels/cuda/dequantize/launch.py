"""Dequantize pages on CUDA, in one launch; see append.dequantize_pages for the meaning."""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable
from dataclasses import replace

import torch

from kvquant.rows.format import RowFormat

from ..device.row_spec import DEQUANTIZE, UNIT, DequantizeSpec
from ..runtime.driver import Launcher
from ..runtime.launch import (
    check_pages,
    current_stream,
    facts_of,
    gpu_of,
    grid_of,
    kernel_of,
    launch_on,
    settle,
    slot_facts,
    strides,
)

TARGETS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
CONSTANTS = struct.Struct("=" + "".join(code for _, code in DEQUANTIZE[3:]))
_settled: dict[Hashable, DequantizeLaunch] = {}


def dequantize(
    rows: torch.Tensor,
    fmt: RowFormat,
    slots: torch.Tensor,
    out: torch.Tensor,
    check: Callable[[], None] | None = None,
) -> None:
    """Dequantize into out on the current stream; see append.dequantize_pages.

    Slots that do not exist give zeros, like negative ones.

    Args:
        check: raises unless the arguments fit one another; called only before a call is settled.

    Raises:
        ConfigError: rows are not aligned.
        UnsupportedError: the GPU is too old, or there are too many slots.
        DeviceError: CUDA refuses the launch.
    """
    key = fmt, facts_of(rows), facts_of(slots), facts_of(out)
    launch = _settled.get(key)
    if launch is None:
        if check:
            check()
        if not out.numel():
            return
        launch = settle(_settled, key, DequantizeLaunch, rows, fmt, out)
    launch_on(rows.get_device(), launch, rows, slots, out)


class DequantizeLaunch:
    """A settled call: everything but addresses."""

    def __init__(self, rows: torch.Tensor, fmt: RowFormat, out: torch.Tensor) -> None:
        check_pages("rows", rows, fmt)
        num_tokens, num_heads, _ = out.shape
        gpu = gpu_of(rows)
        spec = DequantizeSpec(fmt, TARGETS[out.dtype])
        if fmt.codec == "fp8":
            spec = replace(spec, converts_fp8=gpu.converts_fp8)
        grid = grid_of(num_tokens, num_heads, 1, spec.tokens, gpu.num_sms)
        heads = -(-num_heads // grid[1])
        self._constants = CONSTANTS.pack(
            *strides(rows), num_tokens, num_heads, heads, *slot_facts(rows)
        )
        self._index = rows.get_device()
        self._launch = Launcher(kernel_of(spec, rows), grid, f"=3Q{CONSTANTS.size}s")

    def __call__(self, rows: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
        """Launch on the current stream of the current device, which is that of the tensors."""
        target = out
        if out.data_ptr() % UNIT:  # a view: the kernel writes 16 bytes at a time
            target = torch.empty_like(out)
        values = slots.data_ptr(), rows.data_ptr(), target.data_ptr(), self._constants
        self._launch(current_stream(self._index), values)
        if target is not out:
            out.copy_(target)
