"""Attention over a shared prefix on CUDA, in two launches; see kvquant/ops/shared_prefix.py."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvquant.rehearsal import is_rehearsed
from kvquant.rows.segment import RUN, Segment

from ..decode.arrange import CODECS, log2_scale, pack_counts
from ..runtime.launch import Launch, cached_launch, gpu_of
from ..runtime.tensors import Tensors, check_pages, facts_of, is_readable, strides
from .spec import MOST_SPLITS, REGISTERS, CombineSpec, PrefixSpec, fit, worth_splits


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
    """Add attention over a prefix to states, in place, on the current stream.

    Args:
        q: [batch, num_q_heads, head_dim], bfloat16 or float16.
        prefix: the tokens, of one sequence, linear or in pages.
        members: [num_members], int64: who shares it, as in attend_shared; None for all.
        out: [batch, num_q_heads, head_dim of V], the dtype of q, contiguous.
        lse: [batch, num_q_heads], float32, base e, contiguous.
        sm_scale: factor on q·k, positive.
        num_splits: splits of the prefix, at most; chosen when None.
        check: raises unless the arguments fit; called only before a launch is prepared.

    ConfigError if rows are not aligned, UnsupportedError if a format has no kernel; others as of
    cached_launch.
    """
    k_rows, v_rows, seq_lens, k_format, v_format, _, table, _, _ = prefix
    table, members = pack_counts(table), pack_counts(members)
    rows: Tensors = k_rows, v_rows, seq_lens, table
    facts = map(facts_of, (q, members, *rows))
    key = PrefixSpec, k_format, v_format, sm_scale, num_splits, q.is_neg(), *facts
    launch = cached_launch(key, check, _prepare, q, prefix, members, sm_scale, num_splits)
    if launch is None and not is_rehearsed(q):
        return
    num_kv_heads = k_rows.shape[1]
    num_rows = len(q if members is None else members) * (q.shape[1] // num_kv_heads)
    states = launch.grid[2] if launch else 1, num_kv_heads, num_rows  # of the splits
    split_out = torch.empty((*states, v_format.head_dim), dtype=torch.float32, device=q.device)
    split_lse = torch.empty(states, dtype=torch.float32, device=q.device)
    if launch is not None:
        launch((q, members, split_out, split_lse, *rows))
    combine(out, lse, split_out, split_lse, members)


def _prepare(
    q: torch.Tensor,
    prefix: Segment,
    members: torch.Tensor | None,
    sm_scale: float,
    num_splits: int | None,
) -> Launch | None:
    num_members = len(q if members is None else members)
    if not (q.numel() and prefix.capacity and num_members):
        return None
    k_rows, v_rows = prefix.k_rows, prefix.v_rows
    check_pages("k_rows", k_rows, prefix.k_format)
    check_pages("v_rows", v_rows, prefix.v_format)
    num_kv_heads = k_rows.shape[1]
    ratio = q.shape[1] // num_kv_heads
    paged = prefix.block_table is not None
    gpu = gpu_of(q.get_device())
    run = min(k_rows.shape[2], RUN) if paged else RUN
    spec = PrefixSpec(prefix.k_format, prefix.v_format, CODECS[q.dtype], paged, run)
    units = num_kv_heads * worth_splits(prefix.capacity)
    spec = fit(spec, num_members * ratio, gpu.shared_per_block, units, gpu.sm_count)
    blocks, tiles = -(-num_members * ratio // spec.rows), -(-prefix.capacity // spec.tokens)
    per_sm = gpu.blocks_per_sm(spec.warps, REGISTERS[spec.blocks], spec.shared_bytes)
    room = gpu.sm_count * max(per_sm, 1)
    splits = num_splits or room // (blocks * num_kv_heads)
    splits = max(min(splits, tiles, MOST_SPLITS), 1)
    is_copied = q.stride(2) != 1 or not is_readable(q, 4)
    q_stride_batch, q_stride_head = strides(q, is_copied)
    constants: dict[str, float] = {
        f"{side}_stride_{axis}": step
        for side, rows in (("k", k_rows), ("v", v_rows))
        for axis, step in zip(("page", "head", "row"), strides(rows), strict=True)
    }
    constants |= {
        "q_stride_batch": q_stride_batch,
        "q_stride_head": q_stride_head,
        "capacity": prefix.capacity,
        "page_shift": k_rows.shape[2].bit_length() - 1 if paged else 0,
        "num_members": num_members,
        "batch": len(q),
        "ratio": ratio,
        "score_scale": log2_scale(sm_scale),
    }
    grid = blocks, num_kv_heads, splits
    return Launch(spec, q.get_device(), grid, constants, copied=(0,) if is_copied else ())


def combine(
    out: torch.Tensor,
    lse: torch.Tensor,
    prefix_out: torch.Tensor,
    prefix_lse: torch.Tensor,
    members: torch.Tensor | None,
) -> None:
    """Combine the states of a prefix with those of each sequence's own tokens, in place.

    Args:
        out: [batch, num_q_heads, head_dim], bfloat16 or float16, contiguous.
        lse: [batch, num_q_heads], float32, base e.
        prefix_out: [splits, num_kv_heads, num_members * ratio, head_dim], float32 or the dtype of
            out; each split contiguous, at most 32.
        prefix_lse: the same without head_dim, float32, base e; -inf where a split has no tokens.
        members: [num_members] int64, places in the batch, or negative; None for all, in order.
    """
    strides = prefix_out.stride(0), prefix_lse.stride(0)
    dtypes = out.dtype, prefix_out.dtype
    key = CombineSpec, out.shape, prefix_out.shape, dtypes, strides, out.get_device()
    launch = cached_launch(key, None, _prepare_combine, out, prefix_out, prefix_lse)
    if launch is not None:
        launch((out, lse, prefix_out, prefix_lse, members))


def _prepare_combine(
    out: torch.Tensor, prefix_out: torch.Tensor, prefix_lse: torch.Tensor
) -> Launch | None:
    if not prefix_out.numel():
        return None
    splits, num_kv_heads, prefix_rows, head_dim = prefix_out.shape
    spec = CombineSpec(head_dim, CODECS[out.dtype], prefix_out.dtype == out.dtype)
    num_rows = num_kv_heads * prefix_rows
    constants = {
        "out_stride": prefix_out.stride(0) * prefix_out.element_size(),
        "lse_stride": 4 * prefix_lse.stride(0),
        "batch": len(out),
        "num_heads": out.shape[1],
        "ratio": out.shape[1] // num_kv_heads,
        "splits": splits,
        "num_rows": num_rows,
    }
    return Launch(spec, out.get_device(), (-(-num_rows // spec.warps), 1, 1), constants)
