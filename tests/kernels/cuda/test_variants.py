"""AttentionVariant on CUDA against the reference. Needs an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from attend import launch_attention
from cuda_cases import (
    LIMITS,
    NAN,
    assert_right,
    captured,
    int32,
    linear,
    paged,
    queries,
    query,
    ring,
    seated,
)
from query_cases import make_variant
from relative_l2 import relative_l2

from kvquant import decode_attention, reference_attention
from kvquant.errors import ShapeError
from kvquant.rows.reference import reference_over_segments
from kvquant.rows.segment import FixedSegments, Segment
from kvquant.rows.variant import AttentionVariant

pytestmark = pytest.mark.gpu
LENS = (1000, 37, 1, 0, 129)
# of a field that is True the tensor is random
ONE_QUERY: dict[str, Any] = {
    "alibi_slopes": True,
    "score_offsets": True,
    "sink_logits": True,
    "soft_cap": 3.0,
    "window": 100,
}
ALL = {**ONE_QUERY, "tree_mask": True}


def only_packed() -> list[Segment]:
    return [linear("int4-g4", LENS, 2)]


def pages() -> list[Segment]:
    return [paged("int4-g4", LENS, 2, 64)]


def with_recent() -> list[Segment]:
    recent = [min(n, 132) for n in LENS]
    packed = paged("int4-g4", [n - m for n, m in zip(LENS, recent, strict=True)], 2, 16)
    return [packed, seated(ring("bf16", recent, 2, 132, sinks=4))]


KINDS = [only_packed, pages, with_recent]


def compare(
    q: torch.Tensor,
    segments: Sequence[Segment],
    fields: Mapping[str, Any],
    q_lens: Sequence[int] | None = None,
    num_splits: int | None = None,
) -> None:
    """Assert that out and lse are those of the reference, and the same again."""
    numbers = None if q_lens is None else int32(q_lens)
    variant = make_variant(fields, q, segments, numbers)
    if numbers is not None:
        q = q.clone()
        q[torch.arange(q.shape[1], device="cuda") >= numbers[:, None]] = torch.nan
    out, lse = launch_attention(q, segments, None, num_splits, q_lens=numbers, variant=variant)
    assert lse is not None and out.dtype == q.dtype
    expected = reference_over_segments(q, segments, None, numbers, variant)
    assert_right((out, lse), expected, segments)
    again, lse_again = launch_attention(q, segments, None, num_splits, True, numbers, variant)
    assert lse_again is not None
    assert torch.equal(again, out) and torch.equal(lse_again, lse), "two calls differ"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("field", ALL)
def test_every_field_alone(field: str, kind: Callable[[], list[Segment]]) -> None:
    segments, fields = kind(), {field: ALL[field]}
    if field != "tree_mask":
        for num_splits in (None, 1, 3):
            compare(query(segments[0], 8), segments, fields, None, num_splits)
    q = queries(segments[0], 4, 8)
    compare(q, segments, fields)
    compare(q, segments, fields, (4, 3, 4, 1, 0), num_splits=2)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("names", ["int4-g4", "int4", "int3 int2", "int8-g4 bf16", "bf16"])
def test_all_fields_together(names: str, dtype: torch.dtype) -> None:
    segment = linear(names, LENS, 2)
    compare(query(segment, 8, dtype), [segment], ONE_QUERY)
    for heads in (8, 64):
        q = queries(segment, 4, heads, dtype)
        compare(q, [segment], ALL)
        compare(q, [segment], ALL, (1, 4, 4, 2, 3), num_splits=3)


@pytest.mark.parametrize("kind", KINDS)
def test_all_fields_over_segments(kind: Callable[[], list[Segment]]) -> None:
    segments = kind()
    compare(query(segments[0], 8), segments, ONE_QUERY)
    q = queries(segments[0], 4, 8)
    compare(q, segments, ALL)
    compare(q, segments, ALL, (4, 0, 4, 3, 2))


def free(segment: Segment, window: int, q_lens: Sequence[int]) -> None:
    """Let go of the pages before the windows of all queries: others may have them."""
    table, page_size = segment.block_table, segment.k_rows.shape[2]
    assert table is not None
    for b, (seq_len, count) in enumerate(zip(segment.seq_lens.tolist(), q_lens, strict=True)):
        before = max(seq_len - count - window + 1, 0) // page_size
        for rows in (segment.k_rows, segment.v_rows):
            rows[table[b, :before]] = NAN
        table[b, :before] = 2**30


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("window", [1, 15, 16, 33, 100, 512])
def test_windows_and_the_pages_before_them(window: int, page_size: int) -> None:
    lens = (*range(14, 20), *range(30, 36), *range(126, 132), 1000, 0, 1)
    q_lens = [i % 5 for i in range(len(lens))]
    for count, numbers in ((1, None), (4, None), (4, q_lens)):
        segment = paged("int4-g4", lens, 2, page_size)
        q = query(segment, 8) if count == 1 else queries(segment, count, 8)
        given = None if numbers is None else int32(numbers), AttentionVariant(window=window)
        expected, _ = reference_over_segments(q, [segment], None, *given)
        free(segment, window, numbers or [count] * len(lens))
        for num_splits in (None, 2):
            out, _ = launch_attention(q, [segment], None, num_splits, True, *given)
            assert relative_l2(out, expected) <= LIMITS[q.dtype]


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_over_all_tokens_hides_none(kind: Callable[[], list[Segment]]) -> None:
    """Also where the first query would come before the first token, and int32 ends."""
    segments = kind()
    q = queries(segments[0], 64, 2)
    for window in (2**31 - 1, 2**31 - 64, 2**30):
        out, lse = launch_attention(
            q, segments, None, None, variant=AttentionVariant(window=window)
        )
        assert lse is not None
        expected = reference_over_segments(q, segments)
        assert_right((out, lse), expected, segments)


def test_a_window_across_sinks_and_recent_rows() -> None:
    packed = linear("int4-g4", (300, 33, 1, 0, 0, 2), 2)
    for recent_lens in ((132, 102, 132, 3, 0, 5), (4, 4, 6, 12, 1, 2)):
        both = ring("bf16", recent_lens, 2, 132, sinks=40)
        for window in (1, 20, 130, 400):
            fields = {"window": window, "alibi_slopes": True}
            compare(query(packed, 8), [packed, both], fields)
            compare(queries(packed, 4, 8), [packed, both], fields, (4, 3, 4, 2, 1, 0))


@pytest.mark.parametrize("fields", [ONE_QUERY, {"sink_logits": True}], ids=["all", "sinks"])
@pytest.mark.parametrize(
    "lens", [(5000, *[60] * 7), (0, 1, 33, 64, 65, 511, 900, 3600), (1, 4100)], ids=str
)
def test_batches_whose_lengths_differ(lens: Sequence[int], fields: Mapping[str, Any]) -> None:
    segment = linear("int4-g4", lens, 2)
    for window in {"window"} & {*fields}:
        fields = {**fields, window: 700}
    compare(query(segment, 8), [segment], fields)
    q = queries(segment, 4, 8)
    compare(q, [segment], fields, [i % 5 for i in range(len(lens))])


def test_a_tree_of_many_queries() -> None:
    segment = linear("int4-g4", (300, 64, 40, 1), 1)
    q = queries(segment, 64, 2)
    compare(q, [segment], {"tree_mask": True})
    chain = torch.ones(4, 64, 64, dtype=torch.bool, device="cuda").tril()
    out, _ = launch_attention(q, [segment], None, None, variant=AttentionVariant(tree_mask=chain))
    assert relative_l2(out, launch_attention(q, [segment], None, None)[0].double()) <= 1e-3


def test_what_changes_nothing_gives_the_same_bits() -> None:
    segment = linear("int4-g4", LENS, 2)
    q = query(segment, 8)
    no_sinks = AttentionVariant(sink_logits=torch.full((8,), -torch.inf, device="cuda"))
    for variant in (no_sinks, AttentionVariant(window=1 << 40), AttentionVariant()):
        for num_splits in (1, 3):
            plain = launch_attention(q, [segment], None, num_splits)
            changed = launch_attention(q, [segment], None, num_splits, variant=variant)
            for first, second in zip(plain, changed, strict=True):
                assert first is not None and second is not None and torch.equal(first, second)


def test_tensors_of_any_strides() -> None:
    segment = linear("int4-g4", LENS, 2)
    q = queries(segment, 4, 8)
    variant = make_variant(ALL, q, [segment])
    crooked: dict[str, Any] = {}
    for name, value in variant._asdict().items():
        if isinstance(value, torch.Tensor):
            wide = torch.stack([value, torch.zeros_like(value)], -1)
            crooked[name] = wide[..., 0]
    expected = launch_attention(q, [segment], None, None, variant=variant)[0]
    other = variant._replace(**crooked)
    assert torch.equal(launch_attention(q, [segment], None, None, variant=other)[0], expected)


def test_the_public_call() -> None:
    segment = linear("int4-g4", LENS, 2)
    q = queries(segment, 4, 8)
    variant = make_variant(ALL, q, [segment])
    rows = (segment.k_rows, segment.v_rows, segment.seq_lens)
    formats: dict[str, Any] = {"k_format": segment.k_format, "v_format": segment.v_format}
    out = decode_attention(q, *rows, **formats, variant=variant)
    expected = reference_attention(q, *rows, **formats, variant=variant)
    assert relative_l2(out, expected) <= LIMITS[q.dtype]
    with pytest.raises(ShapeError, match="sink_logits"):
        wrong = AttentionVariant(sink_logits=torch.zeros(7, device="cuda"))
        decode_attention(q, *rows, **formats, variant=wrong)


def test_large_caps_slopes_and_offsets() -> None:
    segment = linear("int4-g4", (40_000, 33_001), 1)
    q = query(segment, 4)
    slopes = torch.tensor([2.0**-i for i in (1, 4, 8, 12)], device="cuda")
    offsets = torch.tensor([[1e4, -1e4, 0, 30], [0, 0, -30, 1e-3]], device="cuda")
    for variant in (
        AttentionVariant(alibi_slopes=slopes),
        AttentionVariant(alibi_slopes=slopes, soft_cap=0.1),
        AttentionVariant(soft_cap=1e4),
        AttentionVariant(soft_cap=50.0, score_offsets=offsets),
        AttentionVariant(sink_logits=torch.tensor([-100.0, 0, 50, 1e4], device="cuda")),
    ):
        out, lse = launch_attention(q, [segment], None, None, variant=variant)
        assert lse is not None
        expected = reference_over_segments(q, [segment], None, None, variant)
        assert_right((out, lse), expected, [segment])


@pytest.mark.parametrize("fields", [{}, {**ALL, "window": 600}], ids=["plain", "all"])
def test_a_graph_follows_lengths_counts_and_values(fields: dict[str, Any]) -> None:
    packed = linear("int4-g4", [4096] * 6, 2)
    exact = ring("bf16", [132] * 6, 2, 132, sinks=4)
    for segments in ([packed], [packed, exact]):
        fixed = FixedSegments(segments)
        q, q_lens = queries(packed, 4, 8), int32([4] * 6)
        variant = make_variant(fields, q, segments)
        call = partial(launch_attention, q, fixed, None, None, q_lens=q_lens, variant=variant)
        graph, (out, lse) = captured(call)
        assert lse is not None
        for lens, numbers in (
            ([4096] * 6, [4] * 6),
            ([0, 4096, 0, 1, 2, 3], [4, 3, 2, 1, 4, 4]),
            ([0] * 6, [4] * 6),
            ([100] * 6, [0, 1, 2, 3, 4, 4]),
            ([4096, 9, 9, 9, 9, 2000], [0] * 6),
            ([4096, 9, 31, 32, 33, 2000], [2, 1, 4, 4, 4, 4]),
        ):
            packed.seq_lens.copy_(torch.tensor(lens))
            if len(segments) > 1:
                exact.seq_lens.copy_(torch.tensor([min(n, 132) for n in lens]))
            q_lens.copy_(torch.tensor(numbers))
            q.normal_()
            other = make_variant(fields, q, segments)
            for mine, value in zip(variant, other, strict=True):
                if isinstance(mine, torch.Tensor) and isinstance(value, torch.Tensor):
                    mine.copy_(value)
            q[torch.arange(4, device="cuda") >= q_lens[:, None]] = torch.nan
            out.fill_(torch.nan)
            lse.fill_(torch.nan)
            for _ in range(2):
                graph.replay()
            expected = reference_over_segments(q, segments, None, q_lens, variant)
            assert_right((out, lse), expected, segments)
