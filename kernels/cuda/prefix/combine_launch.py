"""Merge the states of a shared prefix on CUDA, in place; kvquant/ops/shared_prefix.py says what."""

from __future__ import annotations

import struct
from collections.abc import Hashable

import torch

from ..runtime.driver import Launcher
from ..runtime.launch import Tensors, current_stream, kernel_of, launch_on, settle
from .combine_spec import MERGE, MergeSpec

QUERIES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
CONSTANTS = struct.Struct("=" + "".join(code for _, code in MERGE[5:]))
MOST_SPLITS = 32  # one of each lane
_settled: dict[Hashable, MergeLaunch] = {}


def merge_shared(
    out: torch.Tensor,
    lse: torch.Tensor,
    prefix_out: torch.Tensor,
    prefix_lse: torch.Tensor,
    members: torch.Tensor | None,
) -> None:
    """Merge in place, on the current stream.

    Args:
        out: [batch, num_q_heads, head_dim], bfloat16 or float16, contiguous as are all.
        lse: [batch, num_q_heads], float32, base e.
        prefix_out: [splits, num_kv_heads, num_members * ratio, head_dim], float32; at most 32
            splits.
        prefix_lse: [splits, num_kv_heads, num_members * ratio], float32, base e; -inf where a split
            has no tokens, whose out is not read.
        members: [num_members] int64, places in the batch, or negative; None for all, in order.

    Raises:
        UnsupportedError: the GPU is too old.
        DeviceError: CUDA refuses the launch.
    """
    index = out.get_device()
    key = out.shape, prefix_out.shape, out.dtype, members is None, index
    launch = _settled.get(key)
    if launch is None:
        if not prefix_out.numel():
            return
        launch = settle(_settled, key, MergeLaunch, out, prefix_out)
    launch_on(index, launch, (out, lse, prefix_out, prefix_lse, members))


class MergeLaunch:
    """A settled call: everything but addresses."""

    def __init__(self, out: torch.Tensor, prefix_out: torch.Tensor) -> None:
        splits, num_kv_heads, prefix_rows, head_dim = prefix_out.shape
        num_heads = out.shape[1]
        ratio = num_heads // num_kv_heads
        spec = MergeSpec(head_dim, QUERIES[out.dtype])
        rows = num_kv_heads * prefix_rows
        self._constants = CONSTANTS.pack(len(out), num_heads, ratio, splits, rows)
        self._index = out.get_device()
        grid = -(-rows // spec.warps), 1, 1
        layout = f"=5Q{CONSTANTS.size}s"
        self._launch = Launcher(kernel_of(spec, out), grid, layout)

    def __call__(self, tensors: Tensors) -> None:
        """Launch on the current stream of the current device, which is that of the tensors."""
        addresses = [0 if x is None else x.data_ptr() for x in tensors]
        self._launch(current_stream(self._index), (*addresses, self._constants))
