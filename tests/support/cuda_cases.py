"""What the tests of the CUDA kernel share: segments among NaN, and one comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from attend import attend_segments, launch_attention
from query_cases import reference_of_queries
from relative_l2 import relative_l2

from kvquant import RowFormat, quantize_rows
from kvquant.rows.segment import Segment

LIMITS = {torch.bfloat16: 3e-3, torch.float16: 8e-4}
State = tuple[torch.Tensor, torch.Tensor]
Result = TypeVar("Result")
NAN = 0xFF  # bytes that no format reads as a number


def random_rows(fmt: RowFormat, *shape: int, scale: float = 1.0, shift: float = 0.0) -> Any:
    """Quantized rows [*shape, row_bytes] of normal numbers, on the GPU."""
    x = torch.randn(*shape, fmt.head_dim, device="cuda") * scale + shift
    return quantize_rows(x.to(torch.bfloat16) if fmt.codec == "bf16" else x, fmt)


def int32(values: Sequence[int]) -> torch.Tensor:
    """Lengths, starts, pages, on the GPU."""
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def formats(names: str, head_dim: int = 128) -> tuple[RowFormat, RowFormat]:
    """The formats of K and V from one name or two ("int8 int4-g4")."""
    words = names.split()
    return RowFormat.parse(words[0], head_dim), RowFormat.parse(words[-1], head_dim)


def linear(
    names: str, lens: Sequence[int], heads: int, *, head_dim: int = 128, order: str = "heads"
) -> Segment:
    """A segment in place; rows that are not in use hold NaN.

    Args:
        names: the format, or those of K and V ("int8 int4-g4").
        order: "heads": [batch, heads, tokens, bytes]; "tokens": [batch, tokens, heads, bytes].
    """
    k_format, v_format = formats(names, head_dim)
    capacity = max(lens) + 8 - max(lens) % 4
    k = random_rows(k_format, len(lens), heads, capacity, scale=2, shift=1)
    v = random_rows(v_format, len(lens), heads, capacity, shift=0.3)
    for b, seq_len in enumerate(lens):
        k[b, :, seq_len:] = v[b, :, seq_len:] = NAN
    if order == "tokens":
        k, v = (rows.transpose(1, 2).contiguous().transpose(1, 2) for rows in (k, v))
    return Segment(k, v, int32(lens), k_format, v_format)


def seated(segment: Segment) -> Segment:
    """The same sequences at sequence slots among those of others, which hold NaN."""
    batch = len(segment.seq_lens)
    seq_slots = torch.randperm(batch + 2, device="cuda")[:batch]
    stores = []
    for rows in (segment.k_rows, segment.v_rows):
        store = torch.full((batch + 2, *rows.shape[1:]), NAN, dtype=torch.uint8, device="cuda")
        store[seq_slots] = rows
        stores.append(store)
    return segment._replace(k_rows=stores[0], v_rows=stores[1], seq_slots=seq_slots.int())


def ring(
    names: str,
    lens: Sequence[int],
    heads: int,
    capacity: int,
    *,
    sinks: int = 0,
    head_dim: int = 128,
) -> Segment:
    """A ring from random starts, behind sinks; rows that are not in use hold NaN."""
    k_format, v_format = formats(names, head_dim)
    starts = torch.randint(capacity - sinks, (len(lens),)).tolist()
    k = random_rows(k_format, len(lens), heads, capacity, scale=2, shift=1)
    v = random_rows(v_format, len(lens), heads, capacity, shift=0.3)
    for b, seq_len in enumerate(lens):
        slots = [sinks + (starts[b] + i - sinks) % (capacity - sinks) for i in range(capacity)]
        unused = [i if i < sinks else slots[i] for i in range(seq_len, capacity)]
        k[b, :, unused] = v[b, :, unused] = NAN
    return Segment(k, v, int32(lens), k_format, v_format, starts=int32(starts), sinks=sinks)


def paged(
    names: str, lens: Sequence[int], heads: int, page_size: int, *, head_dim: int = 128
) -> Segment:
    """Scattered pages; what is not in use holds NaN, and nonsense in the table."""
    k_format, v_format = formats(names, head_dim)
    most = -(-max(lens) // page_size) + 1
    num_pages = len(lens) * most + 3
    table = torch.randperm(num_pages)[: len(lens) * most].view(len(lens), most)
    k = random_rows(k_format, num_pages, heads, page_size, scale=2, shift=1)
    v = random_rows(v_format, num_pages, heads, page_size, shift=0.3)
    unused = torch.ones(num_pages, page_size, dtype=torch.bool)
    for b, seq_len in enumerate(lens):
        token = torch.arange(seq_len)
        unused[table[b, token // page_size], token % page_size] = False
        table[b, -(-seq_len // page_size) :] = 2**30
    for rows in (k, v):
        rows.transpose(1, 2)[unused.cuda()] = NAN
    return Segment(k, v, int32(lens), k_format, v_format, block_table=table.to("cuda", torch.int32))


def query(segment: Segment, num_q_heads: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A random query [batch, num_q_heads, head_dim]."""
    batch, head_dim = segment.seq_lens.shape[0], segment.k_format.head_dim
    return torch.randn(batch, num_q_heads, head_dim, device="cuda").to(dtype)


def queries(
    segment: Segment, q_len: int, num_q_heads: int, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Random queries [batch, q_len, num_q_heads, head_dim]."""
    batch, head_dim = segment.seq_lens.shape[0], segment.k_format.head_dim
    return torch.randn(batch, q_len, num_q_heads, head_dim, device="cuda").to(dtype)


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


def compare_queries(
    q: torch.Tensor,
    segments: Sequence[Segment],
    q_lens: Sequence[int] | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Assert that out and lse of each query are those of the reference on the tokens that it sees,
    and the same again, with NaN in the padding of q; give out."""
    batch, q_len = q.shape[:2]
    numbers = int32(q_lens if q_lens is not None else [q_len] * batch)
    q = q.clone()  # of the same strides
    q[torch.arange(q_len, device="cuda") >= numbers[:, None]] = torch.nan
    given = None if q_lens is None else numbers
    out, lse = launch_attention(q, segments, None, num_splits, q_lens=given)
    expected, expected_lse = reference_of_queries(q.double().float(), segments, numbers)
    assert out.shape == expected.shape and out.dtype == q.dtype and lse is not None
    for i in range(q_len):
        of_query = expected[:, i], expected_lse[:, i]
        assert_right((out[:, i], lse[:, i]), of_query, segments)
    again, lse_again = launch_attention(q, segments, None, num_splits, q_lens=given)
    assert torch.equal(again, out) and lse_again is not None
    assert torch.equal(lse_again, lse), "two calls differ"
    return out


def compare(
    q: torch.Tensor,
    segments: Sequence[Segment],
    num_splits: int | None = None,
) -> torch.Tensor:
    """Assert that out and lse are those of the reference, and the same again; give out."""
    out: torch.Tensor
    out, lse = attend_segments(q, segments, return_lse=True, num_splits=num_splits)
    expected = attend_segments(q.double().float(), segments, return_lse=True, backend="reference")
    assert out.dtype == q.dtype and lse.dtype == torch.float32
    assert_right((out, lse), expected, segments)
    again, lse_again = attend_segments(q, segments, return_lse=True, num_splits=num_splits)
    assert torch.equal(again, out) and torch.equal(lse_again, lse), "two calls differ"
    return out
