"""What the tests of the CUDA kernel share: segments among NaN, and one comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
from attend import launch_attention
from decode_cases import NAN, Call, Case, make_call
from relative_l2 import relative_l2

from kvquant import RowFormat, quantize_rows
from kvquant.kernels.cuda.decode import launch as launching
from kvquant.rows.segment import Segment

LIMITS = {torch.bfloat16: 3e-3, torch.float16: 8e-4}
State = tuple[torch.Tensor, torch.Tensor]
Result = TypeVar("Result")


def random_rows(fmt: RowFormat, *shape: int, scale: float = 1.0, shift: float = 0.0) -> Any:
    """Quantized rows [*shape, row_bytes] of normal numbers, on the GPU."""
    x = torch.randn(*shape, fmt.head_dim, device="cuda") * scale + shift
    return quantize_rows(x.to(torch.bfloat16) if fmt.codec == "bf16" else x, fmt)


def int32(values: Sequence[int]) -> torch.Tensor:
    """Lengths, starts, pages, on the GPU."""
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def linear(name: str, lens: Sequence[int], heads: int) -> Segment:
    """A segment in place of head_dim 128; rows that are not in use hold NaN."""
    fmt = RowFormat.parse(name, 128)
    capacity = max(lens) + 8 - max(lens) % 4
    k = random_rows(fmt, len(lens), heads, capacity, scale=2, shift=1)
    v = random_rows(fmt, len(lens), heads, capacity, shift=0.3)
    for b, seq_len in enumerate(lens):
        k[b, :, seq_len:] = v[b, :, seq_len:] = NAN
    return Segment(k, v, int32(lens), fmt, fmt)


def paged(name: str, lens: Sequence[int], heads: int, page_size: int) -> Segment:
    """Scattered pages; what is not in use holds NaN, and nonsense in the table."""
    fmt = RowFormat.parse(name, 128)
    most = -(-max(lens) // page_size) + 1
    num_pages = len(lens) * most + 3
    table = torch.randperm(num_pages)[: len(lens) * most].view(len(lens), most)
    k = random_rows(fmt, num_pages, heads, page_size, scale=2, shift=1)
    v = random_rows(fmt, num_pages, heads, page_size, shift=0.3)
    unused = torch.ones(num_pages, page_size, dtype=torch.bool)
    for b, seq_len in enumerate(lens):
        token = torch.arange(seq_len)
        unused[table[b, token // page_size], token % page_size] = False
        table[b, -(-seq_len // page_size) :] = 2**30
    for rows in (k, v):
        rows.transpose(1, 2)[unused.cuda()] = NAN
    return Segment(k, v, int32(lens), fmt, fmt, block_table=table.to("cuda", torch.int32))


def query(segment: Segment, num_q_heads: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A random query [batch, num_q_heads, head_dim]."""
    batch, head_dim = segment.seq_lens.shape[0], segment.k_format.head_dim
    return torch.randn(batch, num_q_heads, head_dim, device="cuda").to(dtype)


def captured(call: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A call in a graph, and what it gives there; its kernel is loaded before."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    return graph, found


def assert_right(found: State, expected: State, segments: Sequence[Segment]) -> None:
    """Assert that out and lse are what was expected, 0 and -inf where a query sees nothing."""
    (out, lse), (wanted, wanted_lse) = found, expected
    assert out.shape == wanted.shape
    used = wanted_lse > -torch.inf
    assert not out[~used].any() and bool((lse[~used] == -torch.inf).all())
    if bool(used.any()):
        assert relative_l2(out, wanted) <= LIMITS[out.dtype]
        # probabilities of bf16 values are rounded to bf16, and their sum is of what was rounded
        limit = 4e-3 if any(one.v_format.codec == "bf16" for one in segments) else 1e-3
        # and float32 sums have errors of their size
        size = float(wanted_lse[used].abs().max())
        assert float((lse - wanted_lse)[used].abs().max()) <= limit + 1e-5 * size


def launch(call: Call, num_splits: int | None = None, want_lse: bool = True) -> Any:
    """Out and lse of a call."""
    given = call.q, call.segments, None, num_splits, want_lse, call.q_lens, call.variant
    return launch_attention(*given, q_indptr=call.q_indptr)


def check_on_gpu(case: Case) -> None:
    """Assert that out and lse are those of the reference, whatever the splits, and the same again.

    What a case says of warps, columns and splits is for the simulator: the launcher chooses here.
    """
    call, is_wide = make_call(case).on("cuda"), case.wide is not None
    if is_wide and torch.cuda.get_device_capability() != launching.WARPGROUPS:
        pytest.skip("no wgmma")
    want_lse = case.want_lse and not is_wide  # with which another kernel is taken
    changes: Any = {"pays": lambda *_: True} if is_wide else {}  # for short contexts, too
    for num_splits in (None, 1, 3):
        with mock.patch.multiple(launching, _launches={}, **changes):
            out, lse = launch(call, num_splits, want_lse)
            again, lse_again = launch(call, num_splits, want_lse)
        assert out.dtype == call.q.dtype and (lse is not None) == want_lse
        found = out, call.lse.float() if lse is None else lse
        assert_right(found, (call.out, call.lse), call.segments)
        assert torch.equal(again, out), "two calls differ"
        assert lse is None or torch.equal(lse_again, lse), "two calls differ"
