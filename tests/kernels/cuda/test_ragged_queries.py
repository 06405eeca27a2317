"""Ragged queries on CUDA: how they are cut into pieces (no GPU), and what they give (a GPU)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from attend import launch_attention
from cuda_cases import assert_right, captured, int32, linear, paged, ring, seated
from in_simulator import SIMULATED, in_simulator
from query_cases import make_variant
from ragged_cases import each_alone, indptr

from kvquant import RowFormat
from kvquant.errors import UnsupportedError
from kvquant.kernels.cuda.decode.ragged import (
    EVERY,
    MOST_COLUMNS,
    PIECE_BYTES,
    Cut,
    Kind,
    PiecesSpec,
    kinds_of,
)
from kvquant.kernels.cuda.decode.spec import columns_of
from kvquant.kernels.cuda.runtime.compile import compile_spec
from kvquant.rows.ragged import pieces_of
from kvquant.rows.segment import Segment

if SIMULATED:
    from fake_cuda import CPU
    from simulated_launches import simulated

FORMATS = "int4 int4-g2 int4-g4 int4-g8 int8 int8-g2 int8-g4 int8-g8 fp8 fp8-g4 bf16 fp16".split()
LENS = (1000, 37, 1, 0, 300)
COUNTS = (70, 37, 2, 1, 1)
DTYPES = (torch.bfloat16, torch.float16)
gpu = pytest.mark.gpu


def cut(at: torch.Tensor, total: int, kinds: Sequence[Kind]) -> list[torch.Tensor]:
    """Cut in the simulator; the pieces of each kind, without the room that is left."""
    batch = len(at) - 1
    with simulated(at):
        made = Cut(CPU, total, batch, tuple(kinds))
        pieces = made(at).long()
    rows = [start // PIECE_BYTES for start in made.starts]
    assert rows == [*accumulate((kind.room + 1 for kind in kinds[:-1]), initial=0)]
    found = []
    for row, kind in zip(rows, kinds, strict=True):
        number = int(pieces[row + kind.room, 0])
        assert 0 <= number <= kind.room
        found.append(pieces[row : row + number])
    return found


@pytest.mark.extra("cuda")
@in_simulator
def test_pieces_are_those_of_the_host() -> None:
    draw, fmt = random.Random(0), RowFormat.parse("int4-g4", 128)
    seen = set()
    for i in range(60):
        size = 300 if i == 0 else draw.choice([1, 2, 5, 40])  # more than a block has threads
        queries = draw.choice([[0, 1, 1, 1, 9], [0, 1, 2, 40], [1], [5, 6, 7], [0, 0, 130]])
        counts, rest = draw.choices(queries, k=size), draw.choice([0, 0, 1, 17])
        at, total = indptr(counts), max(sum(counts) + rest, 1)
        rest, kinds = total - sum(counts), kinds_of(total, size, draw.choice([1, 4, 8, 70]), [fmt])
        seen.add(len(kinds))
        for kind, held in zip(kinds, cut(at, total, kinds), strict=True):
            wanted = torch.stack([torch.from_numpy(x) for x in pieces_of(at.numpy(), kind.size)], 1)
            number = torch.tensor(counts)[wanted[:, 0]]
            wanted = wanted[(number >= kind.least) & (number <= kind.most)]
            assert torch.equal(held[: len(wanted)], wanted)
            behind = held[len(wanted) :]  # rows behind the last sequence's: without tokens
            assert bool((behind[:, 3] == 1 << 30).all() and (behind[:, 2] <= kind.size).all())
            rows = [row for _, first, n, _ in behind.tolist() for row in range(first, first + n)]
            assert rows == ([*range(total - rest, total)] if kind is kinds[-1] else [])
    assert seen == {1, 2, 3}


@pytest.mark.extra("cuda")
@in_simulator
def test_no_piece_of_wrong_numbers_is_outside_of_q() -> None:
    draw, fmt, total = random.Random(1), RowFormat.parse("int4-g4", 128), 20
    for _ in range(40):
        batch, ratio = draw.choice([1, 3, 9]), draw.choice([1, 4, 8])
        at = torch.tensor([draw.randint(-50, 50) for _ in range(batch + 1)], dtype=torch.int32)
        for held in cut(at, total, kinds_of(total, batch, ratio, [fmt])):
            sequence, first, number, behind = held.unbind(1)
            assert bool(((sequence >= 0) & (sequence < batch)).all())
            assert bool((number > 0).all() and (behind >= 0).all())
            assert bool((first >= 0).all() and (first + number).le(total).all())


@pytest.mark.extra("cuda")
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_100"])
def test_machine_code_spills_nothing(arch: str) -> None:
    assert compile_spec(PiecesSpec(), arch).report.stack_bytes == 0


def test_pieces_have_the_columns_of_whole_warps() -> None:
    fmt = RowFormat.parse("int4-g4", 128)
    for total, batch, ratio in ((64, 64, 4), (576, 64, 4), (8192, 1, 8), (5, 9, 1), (70, 3, 100)):
        for _, _, size, _ in kinds_of(total, batch, ratio, [fmt]):
            columns, sharers = columns_of(size * ratio, fmt)
            assert size == 1 or columns * sharers - size * ratio < ratio
            assert size * ratio <= max(MOST_COLUMNS, ratio)


def test_kinds_of_pieces() -> None:
    """Decode steps take the kernel for one query, long chunks the one with most columns, sequences
    with about the mean number of queries the one for so many."""
    fmt = RowFormat.parse("int4-g4", 128)
    assert kinds_of(64, 64, 4, [fmt]) == ((1, 2, 2, 64), (3, EVERY, 16, 24))
    assert kinds_of(64 * 128, 64, 4, [fmt]) == ((1, 2, 2, 64), (3, EVERY, 16, 572))
    mixed = kinds_of(60 + 4 * 128, 64, 4, [fmt])
    assert mixed == ((1, 2, 2, 64), (3, 12, 12, 64), (13, EVERY, 16, 77))
    assert kinds_of(64 * 8, 64, 4, [fmt])[1] == (3, 8, 8, 64)
    # if no sequence can have more queries than a small piece, there is no other kind
    assert kinds_of(2, 64, 4, [fmt]) == ((1, EVERY, 2, 2),)
    assert kinds_of(500, 3, 100, [fmt]) == ((1, EVERY, 1, 500),)


def test_there_is_room_for_the_pieces_of_any_numbers_of_queries() -> None:
    draw, fmt = random.Random(2), RowFormat.parse("int4-g4", 128)
    for _ in range(2000):
        batch, most = draw.choice([1, 2, 9, 70]), draw.choice([1, 2, 3, 5, 17, 300])
        counts, rest = [draw.randint(0, most) for _ in range(batch)], draw.choice([0, 1, 50])
        total = max(sum(counts) + rest, 1)
        kinds = kinds_of(total, batch, draw.choice([1, 3, 4, 8, 16, 64]), [fmt])
        assert [kind.least for kind in kinds] == [1, *(kind.most + 1 for kind in kinds[:-1])]
        assert kinds[-1].most == EVERY
        for kind in kinds:
            own = [n for n in counts if kind.least <= n <= kind.most]
            own += [total - sum(counts)] if kind is kinds[-1] else []
            assert sum(-(-n // kind.size) for n in own) <= kind.room


def compare(
    segments: Sequence[Segment],
    counts: Sequence[int],
    heads: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    num_splits: int | None = None,
    rest: int = 0,
    fields: dict[str, Any] | None = None,
) -> None:
    """Assert that ragged queries give what each sequence does alone, and the same again."""
    total, dim = sum(counts) + rest, segments[0].k_format.head_dim
    q = torch.randn(total, heads, dim, device="cuda").to(dtype)
    variant = make_variant(fields or {}, q, segments)
    expected = each_alone(q.double().float(), segments, counts, variant)
    q[total - rest :] = torch.nan
    options: dict[str, Any] = {"q_indptr": indptr(counts, "cuda"), "variant": variant}
    out, lse = launch_attention(q, segments, None, num_splits, **options)
    assert lse is not None and out.dtype == dtype
    assert_right((out, lse), expected, segments)
    again = launch_attention(q, segments, None, num_splits, **options)
    assert torch.equal(again[0], out) and again[1] is not None and torch.equal(again[1], lse)


@gpu
@pytest.mark.parametrize("name", FORMATS)
def test_every_format(name: str) -> None:
    compare([linear(name, LENS, 2)], COUNTS, 8)
    compare([linear(name, LENS, 2)], COUNTS, 8, torch.float16, num_splits=3, rest=5)


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [2, 8, 10, 16, 64, 142])
def test_heads_and_numbers_of_queries(heads: int, dtype: torch.dtype) -> None:
    segment = linear("int4-g4", LENS, 2)
    for counts in (COUNTS, (1, 1, 1, 1, 1), (0, 0, 0, 0, 300), (3, 1, 0, 0, 2), (0, 1, 0, 0, 0)):
        for num_splits in (None, 1, 4):
            compare([segment], counts, heads, dtype, num_splits=num_splits)


@gpu
@pytest.mark.parametrize("name", ["int4-g4", "int4", "bf16"])
def test_rings_pages_sinks_and_recent_rows(name: str) -> None:
    for page_size in (16, 64, 128):
        compare([paged(name, LENS, 2, page_size)], COUNTS, 8, rest=3)
    rows = ring(name, (132, 5, 3, 0, 40), 2, 132, sinks=4)
    compare([rows], (9, 5, 4, 1, 1), 8)
    compare([seated(rows)], (140, 1, 0, 0, 40), 8)
    recent = seated(ring("bf16", (132, 37, 4, 0, 12), 2, 132, sinks=4))
    for packed in (linear(name, LENS, 2), paged(name, LENS, 2, 64)):
        for num_splits in (None, 2):
            compare([packed, recent], (200, 74, 5, 0, 1), 8, num_splits=num_splits)


@gpu
@pytest.mark.parametrize("lens", [(5000, *[60] * 7), (0, 1, 33, 64, 900, 3600)], ids=str)
def test_sequences_whose_lengths_differ(lens: Sequence[int]) -> None:
    segment = paged("int4-g4", lens, 2, 64)
    compare([segment], [1] * len(lens), 8)
    compare([segment], [1] * (len(lens) - 1) + [60], 8)
    compare([segment], [200] + [1] * (len(lens) - 1), 32)


FIELDS: dict[str, Any] = dict.fromkeys(("alibi_slopes", "score_offsets", "sink_logits"), True) | {
    "soft_cap": 3.0,
    "window": 40,
}


@gpu
@pytest.mark.parametrize("name", [*FIELDS, "all"])
def test_variants(name: str) -> None:
    fields = FIELDS if name == "all" else {name: FIELDS[name]}
    compare([paged("int4-g4", LENS, 2, 32)], COUNTS, 8, fields=fields)
    recent = seated(ring("bf16", (132, 37, 4, 0, 12), 2, 132, sinks=4))
    compare([linear("int8", LENS, 2), recent], COUNTS, 4, num_splits=2, fields=fields)


@gpu
def test_a_graph_serves_any_numbers_of_queries_and_tokens() -> None:
    segment = paged("int4-g4", LENS, 2, 16)
    total, at = 120, indptr(COUNTS, "cuda")
    q = torch.randn(total, 8, 128, device="cuda").bfloat16()

    def call() -> Any:
        return launch_attention(q, [segment], q_indptr=at)

    graph, found = captured(call)
    for counts in (COUNTS, (0, 0, 0, 0, 120), (120, 0, 0, 0, 0), (1, 1, 1, 1, 1), (24,) * 5):
        at.copy_(indptr(counts))
        segment.seq_lens.copy_(int32([n - n // 3 for n in LENS]))
        q.normal_()
        graph.replay()
        expected = each_alone(q.double().float(), [segment], counts)
        assert_right(found, expected, [segment])


@gpu
def test_strided_queries_are_read() -> None:
    segment = linear("int4-g4", LENS, 2)
    whole = torch.randn(3, sum(COUNTS), 24, 128, device="cuda").bfloat16()
    apart = torch.randn(sum(COUNTS), 128, 8, device="cuda").bfloat16().transpose(1, 2)
    for q in (whole[1, :, 8:16], whole[:, :, :8].flatten(0, 1)[::3], apart):
        out, lse = launch_attention(q, [segment], q_indptr=indptr(COUNTS, "cuda"))
        assert lse is not None
        assert_right((out, lse), each_alone(q.double().float(), [segment], COUNTS), [segment])


@gpu
def test_too_many_pieces_are_refused() -> None:
    segment = linear("bf16", (1,), 1)
    q = torch.zeros(70000, 64, 128, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(
        UnsupportedError,
        match=r"70000 ragged queries in 70000 pieces .* at most 65535 pieces",
    ):
        launch_attention(q, [segment], q_indptr=int32([0, *accumulate([70000])]))
