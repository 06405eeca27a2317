"""The numba decode attention against the float64 reference; compiles about 20 kernels."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from attend import attend_segments
from decode_rows import (
    BOTH,
    INT4,
    KINDS,
    LIMIT,
    RAGGED,
    SMALL,
    WHOLE,
    State,
    call_of,
    check_pages,
    hard,
    lens,
    make_rows,
    packed,
    state,
)
from relative_l2 import relative_l2
from segment_cases import assert_close, ring_of
from slow_cases import mark_slow
from threads import run_in_threads

from kvquant import (
    AttentionVariant,
    RowFormat,
    decode_attention,
    dequantize_rows,
    merge_states,
    quantize_rows,
    reference_attention,
)
from kvquant.kernels.cpu import decode
from kvquant.rows.reference import reference_over_segments
from kvquant.rows.segment import Segment

# K, V: every codec, groups of whole chunks of 16 elements and others, each head_dim, K wider than V
PAIRS = [
    (("int3", 1, 80), ("int2", 1, 128)),
    (("int2", 1, 192), ("int3", 1, 112)),
    (("int3", 1, 64), ("int4", 4, 256)),
    (("int8", 4, 96), ("int3", 1, 96)),
    (("int8", 1, 80), ("int4", 1, 80)),
    (("int4", 8, 80), ("fp8", 8, 80)),
    (("bf16", 1, 96), ("fp8", 4, 96)),
    (("fp16", 1, 128), ("bf16", 1, 128)),
    (("int4", 2, 192), ("int4", 8, 192)),
    (("fp8", 2, 192), ("int4", 4, 128)),
    (("fp8", 1, 112), ("fp16", 1, 112)),
    (("int4", 1, 64), ("int8", 2, 256)),
    (("int4", 4, 512), ("int8", 1, 512)),
    (("int3", 1, 512), ("int4", 8, 512)),
]


def check(q: torch.Tensor, *rows: torch.Tensor, **options: Any) -> State:
    """Attend, compare with the reference, and give back what came."""
    out, lse = state(q, *rows, **options)
    options.pop("num_splits", None)
    expected, expected_lse = reference_attention(q, *rows, return_lse=True, **options)
    assert_close((out, lse), (expected, expected_lse), LIMIT)
    for b in range(len(out)):  # no sequence hides behind the others
        assert relative_l2(out[b], expected[b]) <= 2 * LIMIT
    return out, lse


@pytest.mark.parametrize("ratio", mark_slow([1, 2, 3, 4, 5, 7, 8, 16, 17, 24, 32], [1, 4, 17]))
def test_any_ratio_of_query_heads_to_kv_heads(ratio: int) -> None:
    call = call_of(RAGGED, 2 * ratio)
    check(*call, **BOTH)
    check_pages(*call, **BOTH)


OTHERS = (0, (4, 2)), (0, (4, 8))  # several queries in pages of all other sizes


# ratios 1 to 16 have blocks of 16 to 1 tokens: several pages of one block, or blocks of one page
@pytest.mark.parametrize(
    "case",
    mark_slow(
        [*itertools.product(SMALL, [(1, 1), (4, 1)]), (2, (1, 3)), (8, (2, 1)), *OTHERS],
        [(1, (1, 1)), (4, (1, 1)), OTHERS[1]],
    ),
    ids=str,
)
def test_pages_smaller_than_a_block(case: tuple[int, tuple[int, int]]) -> None:
    page_size, (ratio, q_len) = case
    call = call_of(RAGGED, 2 * ratio, q_len=q_len if q_len > 1 else 0)
    check_pages(*call, sizes=[page_size] if page_size else WHOLE, **BOTH)


@pytest.mark.parametrize(
    "pair",
    mark_slow(PAIRS, [PAIRS[0], PAIRS[4]]),
    ids=lambda pair: "+".join("{}-g{}/{}".format(*f) for f in pair),
)
def test_any_pair_of_formats(pair: tuple[tuple[str, int, int], tuple[str, int, int]]) -> None:
    k_format, v_format = (RowFormat(*facts) for facts in pair)
    call = call_of((300, 0, 16, 1), formats=(k_format, v_format))
    options: dict[str, Any] = {"k_format": k_format, "v_format": v_format}
    out, _ = check(*call, **options)
    assert out.shape == (4, 8, v_format.head_dim)
    check_pages(*call, **options)


SPLITS: list[dict[str, Any]] = [{"num_splits": n} for n in (1, 2, 7, 64, 1000)]
SCALES: list[dict[str, Any]] = [{"sm_scale": x} for x in (0.0, 1e-3, -0.125, 2.0)]


@pytest.mark.parametrize("options", SPLITS + SCALES, ids=str)
def test_any_number_of_splits_and_any_softmax_scale(options: dict[str, Any]) -> None:
    check(*call_of((300, 1, 0, 64)), **options | BOTH)


def test_rows_may_have_any_strides_but_their_own() -> None:
    q, k_rows, v_rows, seq_lens = call = call_of((40, 17, 3))
    out, lse = check(*call, **BOTH)

    def view(rows: torch.Tensor, how: str) -> torch.Tensor:
        batch, heads, capacity, row_bytes = rows.shape
        if how == "tokens before heads":
            return rows.transpose(1, 2).contiguous().transpose(1, 2)
        if how == "tokens first":
            return rows.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
        if how == "every second of all":
            room = torch.full(
                (2 * batch, 2 * heads, 2 * capacity, row_bytes), 255, dtype=torch.uint8
            )
            room[::2, 1::2, ::2] = rows
            return room[::2, 1::2, ::2]
        # at an odd address, an odd number of bytes from row to row
        room = torch.full(
            (rows.numel() // row_bytes * (row_bytes + 1) + 1,), 255, dtype=torch.uint8
        )
        odd = room[1:].view(batch, heads, capacity, row_bytes + 1)[..., :row_bytes]
        odd.copy_(rows)
        return odd

    for k_how in ("tokens before heads", "tokens first", "every second of all", "odd"):
        for v_how in ("as it is", k_how):
            k_view = view(k_rows, k_how)
            v_view = v_rows if v_how == "as it is" else view(v_rows, v_how)
            result = state(q, k_view, v_view, seq_lens, **BOTH)
            assert torch.equal(result[0], out), (k_how, v_how)
            assert torch.equal(result[1], lse)


def test_one_sequence_may_be_expanded_to_a_batch() -> None:
    k_rows = make_rows(INT4, (50,), 2).expand(5, -1, -1, -1)
    v_rows = make_rows(INT4, (50,), 1).expand(5, 2, -1, -1)
    seq_lens = torch.tensor([0, 50, 0, 7], dtype=torch.int32)[1::2].repeat(3)[:5]
    q = torch.randn(5, 8, 64)
    check(q, k_rows, v_rows, seq_lens, **BOTH)
    check(q, k_rows, v_rows, lens(9).expand(5), **BOTH)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_splits", [1, 5])
def test_hard_values(kind: str, num_splits: int) -> None:
    q, k, v = hard(kind)
    k_rows, v_rows = packed(k, INT4), packed(v, INT4)
    if kind in ("q of 1e4", "the greatest scale", "one huge outlier", "an offset"):
        # float32 scores of this size are off by more than the limit allows: torch's float32
        # attention on the same dequantized rows sets it
        options = {"num_splits": num_splits, **BOTH}
        out, _ = state(q, k_rows, v_rows, lens(300, 300), **options)
        expected = reference_attention(q, k_rows, v_rows, lens(300, 300), **BOTH)
        k, v = (dequantize_rows(rows, INT4) for rows in (k_rows, v_rows))
        torchs = torch.nn.functional.scaled_dot_product_attention(
            q[:, :, None], k, v, enable_gqa=True
        )[:, :, 0]
        assert relative_l2(out, expected) <= 2 * relative_l2(torchs, expected) + LIMIT
        return
    check(q, k_rows, v_rows, lens(300, 300), num_splits=num_splits, **BOTH)


@pytest.mark.parametrize("num_splits", [None, 3])
def test_segments_of_other_formats_and_rings_are_merged(num_splits: int | None) -> None:
    bf16, q, segments = RowFormat.parse("bf16", 64), torch.randn(3, 8, 64), list[Segment]()
    for fmt, counts in ((bf16, (4, 0, 4)), (INT4, (290, 0, 0)), (bf16, (24, 0, 9))):
        k_rows, v_rows = make_rows(fmt, counts, 2), make_rows(fmt, counts, 2)
        segments.append(Segment(k_rows, v_rows, lens(*counts), fmt, fmt))
    last = segments.pop()
    for _ in range(3):  # rings with sinks that begin anywhere, at any sequence slots
        given = [*segments, ring_of(last.k_rows, last.v_rows, last.seq_lens, bf16, 2)]
        options: dict[str, Any] = {"return_lse": True, "num_splits": num_splits, "backend": "cpu"}
        found = attend_segments(q, given, **options)
        assert_close(found, reference_over_segments(q, given), LIMIT)
        parts: list[Any] = [attend_segments(q, [segment], **options) for segment in given]
        assert relative_l2(merge_states(*parts)[0], found[0]) <= 1e-5


def test_threads_may_call_at_once() -> None:
    """From Python threads, over the size at which a call uses several threads itself."""
    _, *rows = call_of((1500,))
    queries, x = torch.randn(4, 1, 8, 64), torch.randn(600, 64)
    expected = [state(q, *rows, **BOTH)[0] for q in queries]
    quantized = quantize_rows(x, INT4)

    def work(i: int) -> None:
        for _ in range(20):
            assert torch.equal(state(queries[i], *rows, **BOTH)[0], expected[i])
            assert torch.equal(quantize_rows(x, INT4), quantized)

    run_in_threads(work, range(4))


def test_long_sums_lose_no_digits() -> None:
    """The same row over and over, where the rounding errors of a float32 sum all have one sign."""
    tokens = 30_000
    rows = packed(torch.randn(2, 1, 2, 1, 64), INT4).expand(-1, -1, -1, tokens, -1)
    q = torch.randn(1, 8, 64)
    values = dequantize_rows(rows[1, :, :, 0], INT4).repeat_interleave(4, 1)
    for num_splits in (1, None):
        out, lse = state(q, rows[0], rows[1], lens(tokens), num_splits=num_splits, **BOTH)
        assert relative_l2(out, values) <= LIMIT
        one_lse = state(q, rows[0], rows[1], lens(1), **BOTH)[1]
        torch.testing.assert_close(lse, one_lse + torch.tensor(tokens).log(), rtol=1e-5, atol=1e-5)


def test_any_number_of_query_heads_costs_little_more_than_its_own() -> None:
    """Counted in heads of work items: a number without divisors was attended head by head."""
    k_rows = torch.zeros(1, 1, 64, INT4.row_bytes, dtype=torch.uint8)
    segment = Segment(k_rows, k_rows, lens(64), INT4, INT4)
    for ratio in (*range(1, 18), 31, 34, 37, 67, 71, 72, 73, 127):
        heads = decode.heads_of_block(ratio)
        items = decode.Work(torch.zeros(1, ratio, 64), [segment], 1.0, 1)._facts[0]
        assert heads <= decode.MAX_HEADS and heads * items < ratio + items
        assert items == -(-ratio // decode.MAX_HEADS)


@pytest.mark.parametrize(
    ("ratio", "q_len"),
    [(1, 4), (4, 8), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((1, 3), (5, 8)))],
    ids=str,
)
def test_several_queries_share_the_rows(
    ratio: int, q_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many work items as if they were heads of one query; over the size for threads."""
    items: list[int] = []

    attend = decode._attend

    def note(segments: Any, facts: Any, *given: int) -> int:
        items.append(facts[0] * facts[1])
        return int(attend(segments, facts, *given))

    counts, queries = (1500, 5, 0, 300), (q_len, q_len, 1, 1)
    arguments = q, k_rows, v_rows, _ = call_of(counts, 2 * ratio, q_len=q_len)
    for num_splits in (1, 3, 40):
        options: dict[str, Any] = {**BOTH, "q_lens": lens(*queries), "num_splits": num_splits}
        with monkeypatch.context() as patch:
            patch.setattr(decode, "_attend", note)
            out, lse = check(*arguments, **options)
        blocks = -(-ratio * q_len // decode.MAX_HEADS)
        assert items.pop(0) == 4 * 2 * blocks * num_splits
        items.clear()
        for _ in range(3):
            again = state(*arguments, **options)
            assert torch.equal(again[0], out) and torch.equal(again[1], lse)
        seen = lens(*(max(n - m + 1, 0) for n, m in zip(counts, queries, strict=True)))
        alone = state(q[:, 0], k_rows, v_rows, seen, **BOTH, num_splits=num_splits)
        torch.testing.assert_close(out[:, 0], alone[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse[:, 0], alone[1], rtol=1e-5, atol=1e-5)


HOSTILE: dict[str, tuple[float, float, bool]] = {  # element 5 of a query, scale, whether it is NaN
    "inf": (torch.inf, 1e-3, True),
    "-inf": (-torch.inf, 1e-3, True),
    "nan": (torch.nan, 1e-3, True),
    "query": (3e38, 10.0, True),
    "score": (-3e38, 1e-3, True),
    "nearly": (3e36, 1e-3, False),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_score_that_is_not_finite_makes_its_head_nan(
    name: str, tokens: int, num_splits: int
) -> None:
    """Element 5 of all keys is 2000, so that all scores are as large as one is."""
    element, sm_scale, is_nan = HOSTILE[name]
    keys = torch.randn(1, 1, tokens, 64)
    keys[..., 5] = 2000
    k_rows, v_rows = packed(keys, INT4), make_rows(INT4, (tokens,), 1, spare=0)
    q = torch.randn(1, 4, 64)
    q[0, 2, 5] = element
    options: dict[str, Any] = {**BOTH, "sm_scale": sm_scale}
    given = q, k_rows, v_rows, lens(tokens)
    out, lse = state(*given, **options, num_splits=num_splits)
    expected, expected_lse = reference_attention(*given, **options, return_lse=True)
    for mine, theirs in ((out, expected), (lse, expected_lse)):
        assert bool(mine[0, 2].isnan().all()) == bool(theirs[0, 2].isnan().all()) == is_nan
        mine, theirs = mine[0, [0, 1, 3]], theirs[0, [0, 1, 3]]  # the others are as ever
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-2, atol=1e-2)


def test_a_scale_beyond_float32_makes_all_heads_nan() -> None:
    k_rows, v_rows = make_rows(INT4, (9,), 1), make_rows(INT4, (9,), 1)
    given = torch.randn(1, 4, 64), k_rows, v_rows, lens(9)
    for result in (
        *state(*given, **BOTH, sm_scale=1e300),
        *reference_attention(*given, **BOTH, sm_scale=1e300, return_lse=True),
    ):
        assert bool(result.isnan().all())


def test_many_queries_with_a_window_read_their_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a piece and of its window, not those of all queries of the sequence."""
    torch.manual_seed(0)
    window, q_len, seq_lens = 24, 60, lens(200, 90)
    k_rows, v_rows = (quantize_rows(torch.randn(2, 1, 200, 64), "int8") for _ in range(2))
    q, counts = torch.randn(2, q_len, 2, 64), lens(60, 7)
    variant = AttentionVariant(window=window, score_offsets=torch.randn(2, q_len, 2))
    options: dict[str, Any] = {"k_format": "int8", "v_format": "int8", "variant": variant}
    options |= {"q_lens": counts, "return_lse": True}
    longest, work = list[int](), decode.Work

    def spy(heads: torch.Tensor, segments: list[Segment], *given: Any) -> decode.Work:
        longest.append(int((segments[0].seq_lens - given[-1].firsts[0]).max()))
        return work(heads, segments, *given)

    monkeypatch.setattr(decode, "Work", spy)
    found = decode_attention(q, k_rows, v_rows, seq_lens, **options)
    assert max(longest) < window + decode.MAX_HEADS
    wanted = reference_attention(q, k_rows, v_rows, seq_lens, **options)
    assert relative_l2(found[0], wanted[0]) <= LIMIT
    torch.testing.assert_close(found[1], wanted[1].float())
    assert not found[0][1, 7:].any() and (found[1][1, 7:] == -torch.inf).all()
