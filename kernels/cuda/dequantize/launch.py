"""Dequantize pages on CUDA, in one launch; kvquant/ops/rows_at.py has the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kvquant.rows.format import RowFormat

from ..device.row_layout import SIZES, STAGES, UNIT, RowSpec, lanes_of, refuse_latents, staged_bytes
from ..runtime.launch import Launch, cached_launch, gpu_of, grid_of
from ..runtime.spec import Spec, Table
from ..runtime.tensors import check_pages, facts_of, page_arguments

TARGETS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
DEQUANTIZE: Table = (
    ("slots", "P"),  # int64 [num_tokens]
    ("rows", "P"),
    ("out", "P"),  # [num_tokens, num_heads, head_dim]
    ("stride_page", "Q"),  # bytes
    ("stride_head", "Q"),
    ("stride_row", "Q"),
    ("num_tokens", "i"),
    ("num_heads", "i"),
    ("heads_per_block", "i"),
    ("num_slots", "I"),
    ("page_size", "I"),
    ("page_factor", "I"),  # row_layout.divisor
    ("page_shift", "I"),
)


@dataclass(frozen=True)
class DequantizeSpec(RowSpec, Spec):
    """The dequantize kernel of rows fmt.

    target: "bf16", "fp16" or "fp32". converts_fp8: whether the GPU has instructions for E4M3; asked
    for where rows are fp8 only.
    """

    fmt: RowFormat
    target: str = "bf16"
    converts_fp8: bool = True
    warps: int = 4

    arguments = DEQUANTIZE
    kernel = "dequantize.kernel.make_dequantize_kernel"

    @property
    def lanes(self) -> int:
        refuse_latents(self.fmt)
        return lanes_of(self.fmt)

    @property
    def stage_bytes(self) -> int:
        """The rows that a warp has at a time."""
        return self.rows * staged_bytes(self.fmt)

    @property
    def warp_bytes(self) -> int:
        out = self.rows * self.fmt.head_dim * SIZES[self.target]
        return STAGES * self.stage_bytes + out


def dequantize(
    rows: torch.Tensor,
    fmt: RowFormat,
    slots: torch.Tensor,
    out: torch.Tensor,
    check: Callable[[], None] | None = None,
) -> None:
    """Dequantize into out on the current stream; see rows_at.dequantize_pages. Slots that do not
    exist give zeros. Errors: as of append.launch.append."""
    key = DequantizeSpec, fmt, facts_of(rows), facts_of(slots), facts_of(out)
    launch = cached_launch(key, check, _prepare, rows, fmt, out)
    if launch is None:
        return
    target = out
    if out.data_ptr() % UNIT:  # a view: the kernel writes 16 bytes at a time
        target = torch.empty_like(out)
    launch((slots, rows, target))
    if target is not out:
        out.copy_(target)


def _prepare(rows: torch.Tensor, fmt: RowFormat, out: torch.Tensor) -> Launch | None:
    if not out.numel():
        return None
    check_pages("rows", rows, fmt)
    num_tokens, num_heads, _ = out.shape
    gpu = gpu_of(rows.get_device())
    spec = DequantizeSpec(fmt, TARGETS[out.dtype])
    if fmt.pick(e4m3=True, integers=False, elements=False):
        spec = replace(spec, converts_fp8=gpu.converts_fp8)
    grid = grid_of(num_tokens, num_heads, 1, spec.tokens, gpu.sm_count)
    constants = page_arguments(rows) | {"num_tokens": num_tokens, "num_heads": num_heads}
    constants["heads_per_block"] = -(-num_heads // grid[1])
    return Launch(spec, rows.get_device(), grid, constants)
