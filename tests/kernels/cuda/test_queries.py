"""Several queries a sequence on CUDA, each against the reference on the tokens that it sees. Needs
an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from attend import attend_segments, launch_attention
from cuda_cases import (
    LIMITS,
    compare_queries,
    int32,
    linear,
    paged,
    queries,
    query,
    ring,
    seated,
)
from relative_l2 import relative_l2

from kvquant import KVCache, RowFormat, quantize_rows
from kvquant.rows.segment import Segment

pytestmark = pytest.mark.gpu
LENS = (1000, 37, 1, 0)
DTYPES = (torch.bfloat16, torch.float16)
FORMATS = "int4 int4-g2 int4-g4 int4-g8 int8 int8-g2 int8-g4 int8-g8 fp8 fp8-g4 bf16 fp16".split()
FORMATS += "int2", "int3"


@pytest.mark.parametrize("name", FORMATS)
def test_every_format(name: str) -> None:
    segment = linear(name, LENS, 2)
    q = queries(segment, 3, 8)
    compare_queries(q, [segment], (3, 2, 3, 1))
    compare_queries(q, [segment], num_splits=3)


@pytest.mark.parametrize("q_len", [2, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["int4-g4", "int4", "int8-g4", "bf16"])
def test_columns_of_a_warp_and_of_several(name: str, dtype: torch.dtype, q_len: int) -> None:
    segment = linear(name, LENS, 2)
    q = queries(segment, q_len, 8, dtype)
    for num_splits in (None, 3, 1):
        compare_queries(q, [segment], (0, q_len, 1, q_len - 1), num_splits)
        compare_queries(q, [segment], num_splits=num_splits)


@pytest.mark.parametrize(
    ("ratio", "q_len"),
    [(1, 8), (1, 17), (4, 2), (4, 4), (4, 8), (5, 3), (7, 5), (8, 4), (8, 16), (71, 2), (4, 100)],
    ids=str,
)
def test_ratios_and_queries(ratio: int, q_len: int) -> None:
    segment = linear("int4-g4", (300, 129, 6), 2)
    q = queries(segment, q_len, 2 * ratio)
    compare_queries(q, [segment])
    compare_queries(q, [segment], (q_len, 0, q_len - 1))
    compare_queries(q, [segment], (1, q_len // 2, q_len), num_splits=2)


@pytest.mark.parametrize(
    "names", ["int8 int4-g4", "int4 bf16", "fp16 fp8-g4", "bf16 int4", "int3 int2"]
)
def test_k_and_v_formats_apart(names: str) -> None:
    segment = linear(names, LENS, 2)
    compare_queries(queries(segment, 4, 8, torch.float16), [segment], (4, 3, 2, 1))


@pytest.mark.parametrize("head_dim", [64, 80, 256])
@pytest.mark.parametrize("name", ["int4", "bf16"])
def test_head_dims(name: str, head_dim: int) -> None:
    segment = linear(name, LENS, 1, head_dim=head_dim)
    compare_queries(queries(segment, 5, 4), [segment])


@pytest.mark.parametrize("name", ["int4-g4", "bf16"])
@pytest.mark.parametrize("q_len", [2, 4, 9])
def test_lengths_around_tiles_and_shorter_than_the_queries(name: str, q_len: int) -> None:
    lens = (*range(12), *(n + i for n in (32, 64, 128, 256) for i in range(-3, 10)))
    segment = linear(name, lens, 1)
    q = queries(segment, q_len, 4)
    for num_splits in (None, 1, 2, 4):
        compare_queries(q, [segment], num_splits=num_splits)
    compare_queries(q, [segment], [i % (q_len + 1) for i in range(len(lens))])


@pytest.mark.parametrize("name", ["int4-g4", "int8", "bf16"])
@pytest.mark.parametrize("seq_len", [40, 3000])
def test_tokens_that_a_query_does_not_see_do_not_count(name: str, seq_len: int) -> None:
    fmt = RowFormat.parse(name, 128)
    k, v = torch.randn(2, 3, 2, seq_len, 128, device="cuda")
    v[:, :, -8:] *= 100 * torch.arange(1, 9, device="cuda")[:, None]
    segment = Segment(quantize_rows(k, fmt), quantize_rows(v, fmt), int32([seq_len] * 3), fmt, fmt)
    q = queries(segment, 8, 8)
    for num_splits in (None, 1, 3):
        compare_queries(q, [segment], (8, 7, 3), num_splits)


@pytest.mark.parametrize("name", ["int4-g4", "int4", "int3", "int2"])
def test_rings_pages_and_the_order_of_tokens(name: str) -> None:
    rows = ring(name, (311, 97, 0, 31), 2, 311)
    compare_queries(queries(rows, 4, 8), [rows], (4, 3, 1, 2))
    with_sinks = ring(name, (132, 5, 3, 40), 2, 132, sinks=4)
    compare_queries(queries(with_sinks, 4, 8), [with_sinks])
    compare_queries(queries(with_sinks, 4, 8), [seated(with_sinks)])
    tokens = linear(name, (300, 211, 5), 4, order="tokens")
    compare_queries(queries(tokens, 3, 8), [tokens])
    for page_size in (4, 8, 16, 32, 64, 128, 256):
        pages = paged(name, (310, 97, 1, 0, 128), 2, page_size)
        q = queries(pages, 4, 8)
        compare_queries(q, [pages], (4, 3, 4, 4, 2))
        compare_queries(q, [pages], num_splits=2)


@pytest.mark.parametrize("name", ["int4-g4", "bf16"])
@pytest.mark.parametrize("place", ["linear", "paged"])
@pytest.mark.parametrize("heads", [2, 64], ids="{} query heads".format)
def test_sinks_and_recent_rows(name: str, place: str, heads: int) -> None:
    lens = (300, 33, 1, 0, 0, 2)
    packed = paged(name, lens, 2, 64) if place == "paged" else linear(name, lens, 2)
    q = queries(packed, 6, heads)
    for exact_lens in ((132, 102, 132, 3, 0, 5), (4, 4, 6, 12, 1, 2)):
        both = ring("bf16", exact_lens, 2, 132, sinks=4)
        for segments in ([packed, both], [packed, seated(both)], [both], [seated(both)]):
            compare_queries(q, segments)
            compare_queries(q, segments, (6, 5, 6, 4, 6, 0), num_splits=2)
        recent = ring("bf16", exact_lens, 2, 132)
        compare_queries(q, [packed, recent])


LONG = {
    "one far beyond the others": (5000, *[60] * 7),
    "all different": (0, 1, 33, 64, 65, 511, 900, 3600),
    "two": (1, 4100),
    "more than a warp has lanes": (*[17 * i % 190 for i in range(70)], 3000, 5),
}


@pytest.mark.parametrize("name", ["int4-g4", "bf16"])
@pytest.mark.parametrize("lens", LONG.values(), ids=LONG)
def test_batches_whose_lengths_differ(lens: Sequence[int], name: str) -> None:
    segment = linear(name, lens, 2)
    for q_len, heads in ((2, 8), (5, 16)):
        q = queries(segment, q_len, heads)
        compare_queries(q, [segment])
        compare_queries(q, [segment], [i % (q_len + 1) for i in range(len(lens))])


def test_batches_whose_lengths_differ_with_sinks_and_recent_rows() -> None:
    first = (0, 9000, *[100] * 6)
    packed = linear("int4-g4", [max(n - 132, 0) for n in first], 2)
    both = ring("bf16", [min(n, 132) for n in first], 2, 132, sinks=4)
    q = queries(packed, 4, 8)
    compare_queries(q, [packed, both])
    compare_queries(q, [packed, both], [4, 3, 2, 1, 0, 4, 4, 4])


def test_long_sequences_and_tiny_peaked_and_huge_queries() -> None:
    segment = linear("int4-g4", (40_000, 33_001), 1)
    for scale in (0.0, 1e-4, 1.0, 30.0):
        q = (queries(segment, 4, 4).float() * scale).bfloat16()
        compare_queries(q, [segment])
    short = linear("bf16", (40, 3), 1)
    for scale in (0.0, 1e-30, 1e4):
        q = (queries(short, 4, 4).float() * scale).bfloat16()
        compare_queries(q, [short])


def test_queries_of_any_strides() -> None:
    segment = linear("int4-g4", (300, 129), 2)
    by_head = torch.randn(2, 8, 3, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    expected: Any = launch_attention(by_head.contiguous(), [segment], None, None)[0]
    wide = torch.full((2, 5, 10, 256), torch.nan, device="cuda", dtype=torch.bfloat16)
    inside = wide[:, 1:4, 1:9, 128:]
    crooked = torch.empty(2 * 3 * 8 * 128 + 1, device="cuda", dtype=torch.bfloat16)[1:]
    crooked = crooked.view(2, 3, 8, 128)
    by_dim = torch.empty(2, 128, 3, 8, device="cuda", dtype=torch.bfloat16).permute(0, 2, 3, 1)
    for q in (by_head, inside, crooked, by_dim):
        q.copy_(by_head)
        assert torch.equal(launch_attention(q, [segment], None, None)[0], expected)
    compare_queries(by_head, [segment])
    numbers = torch.tensor([[3, 9], [1, 9]], dtype=torch.int32, device="cuda")
    told = launch_attention(by_head, [segment], None, None, q_lens=numbers[:, 0])[0]
    plain = launch_attention(by_head, [segment], None, None, q_lens=numbers[:, 0].clone())[0]
    assert torch.equal(told, plain)


def test_counts_that_are_not_possible_count_as_the_nearest_that_are() -> None:
    segment = linear("int4-g4", (300, 129), 2)
    q = queries(segment, 3, 8)
    told = [
        launch_attention(q, [segment], None, 2, q_lens=int32(numbers))
        for numbers in ([-5, 2**31 - 1], [0, 3])
    ]
    for first, second in zip(*told, strict=True):
        assert first is not None and second is not None and torch.equal(first, second)


def test_one_query_with_an_axis_gives_the_same_bits() -> None:
    segment = linear("int4-g4", (300, 129), 2)
    q = query(segment, 8)
    plain = launch_attention(q, [segment], None, None)
    with_axis = launch_attention(q[:, None], [segment], None, None)
    for first, second in zip(plain, with_axis, strict=True):
        assert first is not None and second is not None
        assert torch.equal(first[:, None], second)


def test_one_query_with_its_counts() -> None:
    segment = linear("int4-g4", (300, 129, 0, 7), 2)
    compare_queries(queries(segment, 1, 8), [segment], (1, 0, 1, 1))


def test_without_lse() -> None:
    segment = linear("int4-g4", (300, 129), 2)
    q = queries(segment, 3, 8)
    for num_splits in (1, 3):
        out, lse = launch_attention(q, [segment], None, num_splits, False)
        assert lse is None
        assert torch.equal(out, launch_attention(q, [segment], None, num_splits)[0])


def test_a_query_gives_what_it_gives_alone() -> None:
    """The plain kernel on one query at a time, with the lengths that it sees."""
    segment = linear("int4-g4", (300, 129), 2)
    q = queries(segment, 4, 8)
    out, lse = launch_attention(q, [segment], None, None)
    for i in range(4):
        seen = segment._replace(seq_lens=segment.seq_lens - 3 + i)
        alone, lse_alone = attend_segments(q[:, i], [seen], return_lse=True)
        assert relative_l2(out[:, i], alone) <= LIMITS[q.dtype]
        assert lse is not None
        torch.testing.assert_close(lse[:, i], lse_alone, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("sizes", [(0, 0), (4, 32), (0, 64)], ids=str)
def test_a_cache(sizes: tuple[int, int]) -> None:
    cache = KVCache(1, 2, 2, 128, 400, sink_len=sizes[0], recent_len=sizes[1], device="cuda")
    k, v = torch.randn(2, 2, 2, 300, 128, device="cuda", dtype=torch.bfloat16)
    cache.append(0, k, v, new_lens=[300, 3])
    cache.append(0, k[:, :, :5], v[:, :, :5])
    q = torch.randn(2, 5, 8, 128, device="cuda", dtype=torch.bfloat16)
    compare_queries(q, cache.layers[0].segments())
    compare_queries(q, cache.layers[0].segments(), (3, 5))
