"""What models change in attention: scores, sinks and masks, beside formulas written by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attend import attend_segments
from decode_rows import BACKENDS, BOTH, LIMIT, lens
from segment_cases import HEADS, assert_close, packed, segments_of
from variant_cases import FIELDS, by_hand, variant_with

from kvquant import AttentionVariant, decode_attention
from kvquant.rows.reference import reference_over_segments

COUNTS, QUERIES = (40, 3, 0, 17), (3, 3, 2, 1)


@pytest.mark.parametrize(
    "names", [*((name,) for name in FIELDS), FIELDS], ids=lambda n: "+".join(n)
)
@pytest.mark.parametrize("kind", ["pages", "ring", "cache"])
def test_every_field_is_its_formula(kind: str, names: tuple[str, ...]) -> None:
    segments, keys, values = segments_of(kind, COUNTS, 64)
    variant = variant_with(names, 4, 3, 4)
    q = torch.randn(4, 3, 4, 64)
    for b, count in enumerate(QUERIES):
        q[b, count:] = torch.nan
    expected = by_hand(q, keys, values, COUNTS, QUERIES, variant)
    for backend in BACKENDS:
        options: dict[str, Any] = {"q_lens": lens(*QUERIES), "variant": variant}
        found = attend_segments(q, segments, return_lse=True, backend=backend, **options)
        assert_close(found, expected, LIMIT)


@pytest.mark.parametrize("names", [("window",), ("alibi_slopes", "tree_mask"), FIELDS], ids=len)
@pytest.mark.parametrize("kind", ["pages", "cache"])
def test_many_queries_and_tokens(kind: str, names: tuple[str, ...]) -> None:
    """Tiles, blocks of heads and splits; tokens before all windows are NaN, whole pages if any."""
    counts, queries = (180, 70, 11, 2), (12, 3, 12, 9)
    segments, _, _ = segments_of(kind, counts, 64)
    variant = variant_with(names, 4, 12, 4)
    if variant.window is not None:
        variant = variant._replace(window=40)
    q = torch.randn(4, 12, 4, 64)
    options: dict[str, Any] = {"q_lens": lens(*queries), "variant": variant}
    expected = reference_over_segments(q, segments, None, **options)
    if variant.window is not None and kind == "pages":
        (segment,) = segments
        assert segment.block_table is not None
        for b in range(2):
            freed = segment.block_table[b, : (counts[b] - queries[b] - 40 + 1) // 16].long()
            segment.k_rows[freed], segment.v_rows[freed] = 255, 255
        assert len(freed) == 1
    for num_splits in (None, 1, 3):
        found = attend_segments(q, segments, num_splits=num_splits, return_lse=True, **options)
        assert_close(found, expected, LIMIT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_query_is_the_same_with_an_axis_and_without(backend: str) -> None:
    segments, keys, values = segments_of("cache", COUNTS, 64)
    variant = variant_with([name for name in FIELDS if name != "tree_mask"], 4, 1, 4)
    assert variant.score_offsets is not None
    q = torch.randn(4, 4, 64)
    options: dict[str, Any] = {"return_lse": True, "backend": backend}
    expected = by_hand(q[:, None], keys, values, COUNTS, [1] * 4, variant)
    alone = variant._replace(score_offsets=variant.score_offsets[:, 0])
    out, lse = attend_segments(q, segments, variant=alone, **options)
    assert_close((out[:, None], lse[:, None]), expected, LIMIT)
    plain = attend_segments(q, segments, **options)
    same = attend_segments(q, segments, variant=AttentionVariant(), **options)
    assert all(map(torch.equal, same, plain))


@pytest.mark.parametrize("names", [("soft_cap", "window"), FIELDS], ids=len)
def test_torch_compile_takes_them(names: tuple[str, ...]) -> None:
    rows = packed(2, HEADS, 30)
    given = torch.randn(2, 3, 4, 64), rows, rows, lens(30, 9)
    options = {**BOTH, "variant": variant_with(names, 2, 3, 4)}
    compiled = torch.compile(decode_attention, fullgraph=True, backend="eager")
    for window in (options["variant"].window, 4, 5):  # a number of the graph then
        options["variant"] = options["variant"]._replace(window=window)
        assert torch.equal(compiled(*given, **options), decode_attention(*given, **options))


@pytest.mark.parametrize("name", ["sink_logits", "alibi_slopes", "score_offsets"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_model_has_learned_leads_to_no_gradient(name: str, backend: str) -> None:
    rows, plain = packed(2, HEADS, 30), variant_with((name,), 2, 1, 4)
    learned: Any = torch.nn.Parameter(getattr(plain, name))
    q = torch.randn(2, 1, 4, 64)
    options: dict[str, Any] = {**BOTH, "return_lse": True, "backend": backend}
    variant = plain._replace(**{name: learned})
    found = decode_attention(q, rows, rows, lens(30, 9), variant=variant, **options)
    assert not any(x.requires_grad for x in found)
    same = decode_attention(q, rows, rows, lens(30, 9), variant=plain, **options)
    assert all(map(torch.equal, found, same))
