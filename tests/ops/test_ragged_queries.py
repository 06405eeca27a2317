"""Ragged queries, [total, num_q_heads, head_dim] with q_indptr: each sequence is as alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attend import attend_segments
from decode_rows import BACKENDS, BOTH, LIMIT, lens
from hypothesis import given
from hypothesis import strategies as st
from ragged_cases import each_alone, indptr
from segment_cases import HEADS, assert_close, packed, segments_of
from slow_cases import mark_slow
from small_caches import layer_basis
from torch._dynamo.testing import CompileCounterWithBackend
from variant_cases import FIELDS, variant_with

from kvquant import KVCache, RowFormat, decode_attention, quantize_rows, reference_attention
from kvquant.errors import ShapeError
from kvquant.rows.basis import LayerBasis
from kvquant.rows.segment import Segment

LENS = (40, 0, 1, 17, 33)
CHUNKS = (12, 3, 2, 0, 1)  # a chunk, more queries than tokens, none, one
KINDS = ("linear", "pages", "ring", "cache")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", mark_slow([2, 8, 10, 40], [8]))
@pytest.mark.parametrize("kind", KINDS)
def test_sequences_are_as_alone(kind: str, heads: int, backend: str) -> None:
    segments, _, _ = segments_of(kind, LENS, 64)
    for counts in (CHUNKS, (1, 1, 1, 1, 1), (0, 0, 0, 0, 40), (0, 1, 0, 20, 0)):
        q = torch.randn(sum(counts), heads, 64)
        expected = each_alone(q, segments, counts)
        for num_splits in (None, 3):
            options: dict[str, Any] = {"num_splits": num_splits, "backend": backend}
            found = attend_segments(
                q, segments, q_indptr=indptr(counts), return_lse=True, **options
            )
            assert_close(found, expected, LIMIT)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 45)), min_size=1, max_size=4))
def test_any_numbers_of_queries_and_tokens(each: list[tuple[int, int]]) -> None:
    tokens, counts = (tuple(one) for one in zip(*each, strict=True))
    torch.manual_seed(0)
    segments, _, _ = segments_of("pages", tokens, 64)
    q = torch.randn(sum(counts), 4, 64)
    found = attend_segments(q, segments, q_indptr=indptr(counts), return_lse=True)
    assert found[0].shape == q.shape and found[1].shape == q.shape[:-1]
    if len(q):
        assert_close(found, each_alone(q, segments, counts), LIMIT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_public_calls(dtype: torch.dtype) -> None:
    v_format = RowFormat.parse("int8", 96)
    rows = packed(3, HEADS, 40), packed(3, HEADS, 40, fmt=v_format)
    q, counts = torch.randn(9, 4, 64).to(dtype), (5, 0, 4)
    given = q, *rows, lens(40, 7, 3)
    options: dict[str, Any] = {"k_format": "int4-g4", "v_format": v_format, "return_lse": True}
    out, lse = decode_attention(*given, q_indptr=indptr(counts), **options)
    assert (out.dtype, lse.dtype, out.shape, lse.shape) == (
        dtype,
        torch.float32,
        (9, 4, 96),
        (9, 4),
    )
    expected = reference_attention(*given, q_indptr=indptr(counts), **options)
    limit = {torch.float32: LIMIT, torch.bfloat16: 3e-3, torch.float16: 8e-4}[dtype]
    assert_close((out, lse), expected, limit)
    for b, (begin, end) in enumerate([(0, 5), (5, 5), (5, 9)]):
        alone = [x[b : b + 1] for x in given[1:]]
        if end > begin:
            padded = reference_attention(q[None, begin:end], *alone, **options)
            for one, other in zip(expected, padded, strict=True):
                torch.testing.assert_close(one[begin:end], other[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "names",
    [(name,) for name in FIELDS if name != "tree_mask"]
    + [tuple(name for name in FIELDS if name != "tree_mask")],
    ids="+".join,
)
def test_variants(names: tuple[str, ...], backend: str) -> None:
    variant = variant_with(names, len(LENS), 1, 4)
    if variant.score_offsets is not None:
        variant = variant._replace(score_offsets=torch.randn(sum(CHUNKS), 4))
    q, at = torch.randn(sum(CHUNKS), 4, 64), indptr(CHUNKS)
    for kind in ("pages", "cache"):
        segments, _, _ = segments_of(kind, LENS, 64)
        expected = each_alone(q, segments, CHUNKS, variant)
        found = attend_segments(
            q, segments, q_indptr=at, variant=variant, return_lse=True, backend=backend
        )
        assert_close(found, expected, LIMIT)


def in_basis(kind: str) -> tuple[KVCache, LayerBasis]:
    """A cache of LENS tokens in a basis without or with a matrix."""
    basis = layer_basis(kind)
    cache = KVCache(1, 5, HEADS, 64, 100, sink_len=2, recent_len=8, bases=[basis])
    k, v = torch.randn(2, 5, HEADS, 40, 64)
    cache.append(0, k, v, LENS)
    return cache, basis


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["none", "matrix"])
@pytest.mark.parametrize("names", [(), ("soft_cap", "sink_logits", "window")], ids=len)
def test_rows_in_a_basis(names: tuple[str, ...], kind: str, backend: str) -> None:
    cache, basis = in_basis(kind)
    q, at = torch.randn(sum(CHUNKS), 4, 64), indptr(CHUNKS)
    variant = variant_with(names, len(LENS), 1, 4)
    options: dict[str, Any] = {"q_indptr": at, "variant": variant, "backend": backend}
    segments = cache.segments(0)
    found = attend_segments(q, segments, basis=basis, return_lse=True, **options)
    # the values that the rows hold, as a segment in no basis
    exact = RowFormat.parse("fp16", 64)
    keys, values = cache.dequantized(0)
    rows = [quantize_rows(x, exact) for x in (keys, values)]
    plain = Segment(rows[0], rows[1], lens(*LENS), exact, exact)
    expected = each_alone(q, [plain], CHUNKS, variant)
    assert_close(found, expected, 2e-3)  # of fp16 values
    padded = torch.zeros(5, max(CHUNKS), 4, 64)
    for b, part in enumerate(q.split(CHUNKS)):
        padded[b, : len(part)] = part
    options |= {"q_indptr": None, "q_lens": lens(*CHUNKS)}
    whole = attend_segments(padded, segments, basis=basis, return_lse=True, **options)
    is_query = torch.arange(max(CHUNKS)) < lens(*CHUNKS)[:, None]
    assert_close(found, (whole[0][is_query].double(), whole[1][is_query].double()), LIMIT)
    alone = attend_segments(q, segments, basis=basis, **options | {"q_indptr": at, "q_lens": None})
    assert torch.equal(alone, found[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_where_nothing_is_and_in_rows_of_padding(backend: str) -> None:
    segments, _, _ = segments_of("pages", LENS, 64)  # unused rows and pages are NaN
    q = torch.randn(sum(CHUNKS) + 3, 4, 64)
    q[-3:] = torch.nan
    options: dict[str, Any] = {"return_lse": True, "backend": backend}
    found = attend_segments(q, segments, q_indptr=indptr(CHUNKS), padded=True, **options)
    assert_close(found, each_alone(q, segments, CHUNKS), LIMIT)
    empty = segments[0]._replace(
        seq_lens=lens(*LENS, 0),
        block_table=segments[0].block_table[[0, 1, 2, 3, 4, 0]],  # type: ignore[index]
    )
    again = attend_segments(q, [empty], q_indptr=indptr((*CHUNKS, 3)), **options)
    assert not again[0][-3:].any() and bool((again[1][-3:] == -torch.inf).all())


def test_no_query_and_no_sequence() -> None:
    rows = packed(2, HEADS, 20)
    q, options = torch.zeros(0, 4, 64), {**BOTH, "return_lse": True}
    out, lse = decode_attention(q, rows, rows, lens(5, 20), q_indptr=lens(0, 0, 0), **options)
    assert (out.shape, lse.shape) == ((0, 4, 64), (0, 4))
    none = decode_attention(q, rows[:0], rows[:0], lens(), q_indptr=lens(0), **BOTH)
    assert none.shape == (0, 4, 64)


Q = torch.zeros(6, 4, 64)


def test_rows_behind_the_last_sequence_where_they_are_allowed() -> None:
    segments, _, _ = segments_of("linear", (5, 20), 64)
    with pytest.raises(ShapeError, match="with 7, and q has 6 rows: it must end with no more"):
        attend_segments(Q, segments, q_indptr=lens(0, 3, 7), padded=True)
    out = attend_segments(Q, segments, q_indptr=lens(0, 3, 5), padded=True)
    assert out.shape == (6, 4, 64) and not out[5].any()


COMPILERS = ["eager", "aot_eager"]


@pytest.mark.parametrize("compiler", COMPILERS)
def test_one_graph_serves_all_counts(compiler: str) -> None:
    torch._dynamo.reset()
    rows, tokens = packed(3, HEADS, 40), lens(40, 7, 33)

    def call(q: torch.Tensor, at: torch.Tensor) -> Any:
        return decode_attention(2 * q, rows, rows, tokens, q_indptr=at, **BOTH, return_lse=True)

    counter = CompileCounterWithBackend(compiler)
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    q = torch.randn(12, 4, 64)
    for counts in ((10, 1, 1), (4, 4, 4), (0, 0, 12), (1, 11, 0)):
        for found, expected in zip(
            compiled(q, indptr(counts)), call(q, indptr(counts)), strict=True
        ):
            torch.testing.assert_close(found, expected)
    assert counter.frame_count == 1
    with pytest.raises(ShapeError, match="q_indptr falls from 5 to 3"):  # where the graph runs
        compiled(q, lens(0, 5, 3, 12))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(compiler)
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for total in (12, 30, 3):
        q = torch.randn(total, 4, 64)
        torch._dynamo.mark_dynamic(q, 0)
        found, expected = compiled(q, lens(0, 1, 2, total)), call(q, lens(0, 1, 2, total))
        torch.testing.assert_close(found, expected)
    assert counter.frame_count == 1


@pytest.mark.parametrize("kind", ["none", "matrix"])
def test_a_basis_in_a_graph(kind: str) -> None:
    torch._dynamo.reset()
    cache, basis = in_basis(kind)

    def call(q: torch.Tensor, at: torch.Tensor) -> Any:
        options: dict[str, Any] = {"basis": basis, "return_lse": True}
        return attend_segments(q, list(cache.segments(0)), q_indptr=at, **options)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    q = torch.randn(sum(CHUNKS), 4, 64)
    for counts in (CHUNKS, (1, 1, 1, 1, sum(CHUNKS) - 4)):
        torch.testing.assert_close(compiled(q, indptr(counts)), call(q, indptr(counts)))
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore::UserWarning")  # of opcheck's own graphs
def test_torch_finds_nothing_wrong_with_the_op() -> None:
    rows = packed(3, HEADS, 20)
    fields = [
        [one] for one in (rows, rows, lens(20, 3, 9), "int4-g4", "int4-g4", None, None, 0, None)
    ]
    variant = 50.0, torch.ones(4), -torch.ones(4), 7, None, torch.ones(6, 4)
    options = 64, None, True, None, None, None, lens(0, 3, 3, 5), True
    arguments = (torch.randn(6, 4, 64), *fields, *options, *variant)
    torch.library.opcheck(torch.ops.kvquant.attend_segments.default, arguments)
