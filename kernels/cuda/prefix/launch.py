"""Attention over a shared prefix on CUDA, in two launches; see kvquant/ops/shared_prefix.py."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Hashable

import torch

from kvquant.rows.segment import Segment

from ..decode.arrange import pack_counts
from ..runtime.driver import Launcher
from ..runtime.launch import (
    Tensors,
    aligned_copy,
    check_pages,
    current_stream,
    facts_of,
    gpu_of,
    kernel_of,
    launch_on,
    settle,
    strides,
)
from .combine_launch import MOST_SPLITS, merge_shared
from .spec import PREFIX, PrefixSpec, blocks_per_sm, fit

QUERIES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
CONSTANTS = struct.Struct("=" + "".join(code for _, code in PREFIX[8:]))
_settled: dict[Hashable, PrefixLaunch] = {}


def add_prefix(
    q: torch.Tensor,
    prefix: Segment,
    members: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    sm_scale: float,
    num_splits: int | None = None,
    check: Callable[[], None] | None = None,
) -> None:
    """Merge attention over a prefix into states, in place, on the current stream.

    Args:
        q: [batch, num_q_heads, head_dim], bfloat16 or float16.
        prefix: the tokens, of one sequence, linear or in pages.
        members: [num_members], int64: who shares it, as in attend_shared; None for all.
        out: [batch, num_q_heads, head_dim of V], the dtype of q, contiguous.
        lse: [batch, num_q_heads], float32, base e, contiguous.
        sm_scale: factor on q·k, positive.
        num_splits: parts that the prefix is cut into, at most; chosen when None.
        check: raises unless the arguments fit one another; called only before a call is settled.

    Raises:
        ConfigError: rows are not aligned.
        UnsupportedError: the GPU is too old, or a format has no kernel.
        DeviceError: CUDA refuses the launch.
    """
    k_rows, v_rows, seq_lens, k_format, v_format, _, table, _, _ = prefix
    table, members = pack_counts(table), pack_counts(members)
    tensors: Tensors = q, members, None, None, k_rows, v_rows, seq_lens, table
    key = k_format, v_format, sm_scale, num_splits, q.is_neg(), *map(facts_of, tensors)
    launch = _settled.get(key)
    if launch is None:
        if check:
            check()
        if not (q.numel() and prefix.capacity and (members is None or len(members))):
            return
        launch = settle(_settled, key, PrefixLaunch, q, prefix, members, sm_scale, num_splits)
    shape = launch.shape
    parts = torch.empty(shape, dtype=torch.float32, device=q.device)
    parts_lse = torch.empty(shape[:3], dtype=torch.float32, device=q.device)
    launch_on(
        q.get_device(), launch, (q, members, parts, parts_lse, k_rows, v_rows, seq_lens, table)
    )
    merge_shared(out, lse, parts, parts_lse, members)


class PrefixLaunch:
    """A settled call: everything but addresses.

    Attributes:
        shape: of the splits' outs: [splits, num_kv_heads, num_members * ratio, head_dim of V].
    """

    def __init__(
        self,
        q: torch.Tensor,
        prefix: Segment,
        members: torch.Tensor | None,
        sm_scale: float,
        num_splits: int | None,
    ) -> None:
        k_rows, v_rows = prefix.k_rows, prefix.v_rows
        check_pages("k_rows", k_rows, prefix.k_format)
        check_pages("v_rows", v_rows, prefix.v_format)
        num_members = len(q if members is None else members)
        num_kv_heads = k_rows.shape[1]
        ratio = q.shape[1] // num_kv_heads
        paged = prefix.block_table is not None
        gpu = gpu_of(q)
        spec = PrefixSpec(prefix.k_format, prefix.v_format, QUERIES[q.dtype], paged)
        spec = fit(spec, num_members * ratio, gpu.shared_of_block)
        units = -(-num_members * ratio // spec.rows) * num_kv_heads
        tiles = -(-prefix.capacity // spec.tokens)
        splits = num_splits or gpu.num_sms * blocks_per_sm(spec, gpu.shared_of_sm) // units
        splits = max(min(splits, tiles, MOST_SPLITS), 1)
        self.shape = splits, num_kv_heads, num_members * ratio, prefix.v_format.head_dim
        q_strides = strides(q)
        # what the kernel cannot read 4 bytes at a time is copied
        odd = any(n % 4 for n in (q.data_ptr(), *q_strides))
        self._copies_q = q.is_neg() or q.stride(2) != 1 or odd
        if self._copies_q:
            q_strides = strides(torch.empty(q.shape, dtype=q.dtype, device="meta"))
        self._constants = CONSTANTS.pack(
            *q_strides,
            *strides(k_rows),
            *strides(v_rows),
            prefix.capacity,
            k_rows.shape[2].bit_length() - 1 if paged else 0,
            num_members,
            len(q),
            ratio,
            sm_scale * math.log2(math.e),
        )
        self._index = q.get_device()
        grid = units // num_kv_heads, num_kv_heads, splits
        self._launch = Launcher(kernel_of(spec, q), grid, f"=8Q{CONSTANTS.size}s")

    def __call__(self, tensors: Tensors) -> None:
        """Launch on the current stream of the current device, which is that of the tensors."""
        q, *others = tensors
        assert q is not None
        if self._copies_q:
            q = aligned_copy(q)
        addresses = [0 if x is None else x.data_ptr() for x in (q, *others)]
        self._launch(current_stream(self._index), (*addresses, self._constants))
