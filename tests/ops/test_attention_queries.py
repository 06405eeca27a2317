"""Several queries a sequence: each sees the tokens up to its own, and is like one alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from attend import attend_segments
from decode_rows import BACKENDS, BOTH, LIMIT, lens
from hypothesis import given, settings
from hypothesis import strategies as st
from segment_cases import HEADS, assert_close, packed, segments_of
from slow_cases import mark_slow
from variant_cases import by_hand

from kvquant import decode_attention
from kvquant.rows.reference import reference_over_segments

LENGTHS = st.sampled_from([0, 1, 2, 3, 7, 15, 16, 17, 33, 40])


KINDS = ("linear", "pages", "ring", "cache")
EACH = [*itertools.product(KINDS, (1, 2, 3, 8), ((1, 64), (4, 128), (5, 64)))]
USUAL = [*((kind, 3, (4, 128)) for kind in KINDS), ("pages", 8, (1, 64))]


@pytest.mark.parametrize("case", mark_slow(EACH, USUAL), ids=str)
def test_each_query_sees_the_tokens_up_to_its_own(case: tuple[str, int, tuple[int, int]]) -> None:
    kind, q_len, (ratio, dim) = case

    @settings(max_examples=6)
    @given(st.lists(st.tuples(LENGTHS, st.integers(0, q_len)), min_size=2, max_size=3), st.data())
    def check(each: list[tuple[int, int]], data: st.DataObject) -> None:
        counts, queries = (list(one) for one in zip(*each, strict=True))
        num_splits = data.draw(st.sampled_from([None, 1, 3]))
        is_ragged = data.draw(st.booleans())
        torch.manual_seed(0)
        segments, keys, values = segments_of(kind, tuple(counts), dim)
        q = torch.randn(len(each), q_len, HEADS * ratio, dim)
        if is_ragged:
            for b, count in enumerate(queries):
                q[b, count:] = torch.nan
        expected = by_hand(q, keys, values, counts, queries if is_ragged else [q_len] * len(each))
        q_lens = lens(*queries) if is_ragged else None
        exact = reference_over_segments(q, segments, None, q_lens)
        assert_close(exact, expected, 1e-12 if kind != "cache" else 1e-6)
        for backend in BACKENDS:
            options: dict[str, Any] = {"num_splits": num_splits, "backend": backend}
            found = attend_segments(q, segments, q_lens=q_lens, return_lse=True, **options)
            assert_close(found, exact, LIMIT)

    check()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spoiled", [0, 1], ids="KV")
def test_a_nan_row_reaches_only_queries_that_see_it(spoiled: int, backend: str) -> None:
    rows = packed(1, HEADS, 30), packed(1, HEADS, 30)
    rows[spoiled][0, 1, 27] = 255
    q = torch.randn(1, 4, 6, 64)
    out = decode_attention(q, *rows, lens(30), **BOTH, backend=backend)
    assert out[0, :, 3:].isnan().flatten(1).all(1).tolist() == [False, True, True, True]
    assert bool(out[0, :, :3].isfinite().all() and out[0, 0].isfinite().all()), "all others"


@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_that_are_infinite_make_themselves_nan(backend: str) -> None:
    rows, q = (packed(1, HEADS, 30), packed(1, HEADS, 30)), torch.randn(1, 4, 6, 64)
    q[0, 2, 1, 5] = torch.inf
    out = decode_attention(q, *rows, lens(30), **BOTH, backend=backend)
    bad = out.isnan().all(-1)
    assert bad.nonzero().tolist() == [[0, 2, 1]] and int(out.isnan().any(-1).sum()) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_may_have_any_strides(backend: str) -> None:
    """Those of [batch, heads, tokens, head_dim], of one sequence for all, or none at all."""
    rows, options = (packed(2, HEADS, 30), packed(2, HEADS, 30)), {**BOTH, "backend": backend}
    q = torch.randn(2, 6, 3, 128)[..., ::2].transpose(1, 2)
    q_lens = lens(3, 9, 2, 9)[::2]
    out = decode_attention(q, *rows, lens(30, 9), q_lens=q_lens, **options)
    same = decode_attention(
        q.contiguous(), *rows, lens(30, 9), q_lens=q_lens.contiguous(), **options
    )
    assert torch.equal(out, same) and out.is_contiguous()
    one = torch.randn(1, 1, 1, 64).expand(2, 3, 4, 64)
    out = decode_attention(one, *rows, lens(30, 9), q_lens=lens(3).expand(2), **options)
    assert torch.equal(out, decode_attention(one.contiguous(), *rows, lens(30, 9), **options))
    for shape in ((2, 0, 4, 64), (2, 3, 0, 64)):
        found = decode_attention(torch.randn(shape), *rows, lens(30, 9), return_lse=True, **options)
        assert (found[0].shape, found[1].shape) == (shape, shape[:-1])
    none = decode_attention(
        torch.randn(0, 3, 4, 64), rows[0][:0], rows[1][:0], lens(), return_lse=True, **options
    )
    assert (none[0].shape, none[1].shape) == ((0, 3, 4, 64), (0, 3, 4))
    grown = torch.randn(2, 3, 4, 64, requires_grad=True)
    assert not decode_attention(grown, *rows, lens(30, 9), **options).requires_grad
