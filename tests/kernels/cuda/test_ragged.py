"""Batches whose lengths differ: work is cut on the device (schedule.py). Needs an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from attend import attend_segments
from cuda_cases import LIMITS, captured, compare, linear, paged, query, ring
from relative_l2 import relative_l2

pytestmark = pytest.mark.gpu
LENS = {
    "one far beyond the others": (5000, *[60] * 7),
    "the last far beyond the others": (*[60] * 7, 5000),
    "all different": (0, 1, 33, 64, 65, 511, 900, 3600),
    "only one has tokens": (0, 0, 0, 4000, 0),
    "two": (1, 4100),
    "more than a warp has lanes": (*[17 * i % 190 for i in range(70)], 3000, 5),
    "more than a warp asks for at once": (*[i % 40 for i in range(300)], 2600),
}
FORMATS = ("int4-g4", "int4", "int3", "int2", "int8-g4", "bf16")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
def test_rows_in_place(lens: Sequence[int], name: str) -> None:
    segment = linear(name, lens, 2)
    compare(query(segment, 8), [segment])


@pytest.mark.parametrize("heads", [(1, 1), (40, 2), (24, 24)], ids=str)
def test_head_ratios(heads: tuple[int, int]) -> None:
    segment = linear("int4-g4", LENS["all different"], heads[1])
    compare(query(segment, heads[0], torch.float16), [segment])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("lens", [LENS["all different"], LENS["two"]], ids=str)
def test_pages(lens: Sequence[int], name: str) -> None:
    segment = paged(name, lens, 2, 64)
    compare(query(segment, 8), [segment])


@pytest.mark.parametrize("name", ["int4-g4", "bf16"])
def test_rings(name: str) -> None:
    segment = ring(name, (3000, 97, 0, 31), 2, 3000)
    compare(query(segment, 8), [segment])


@pytest.mark.parametrize("name", ["int4-g4", "int8"])
@pytest.mark.parametrize("first", [LENS["all different"], (0, 9000, *[100] * 6)], ids=str)
def test_sinks_and_recent_rows(first: Sequence[int], name: str) -> None:
    sinks = linear("bf16", [min(n, 4) for n in first], 2)
    recent = ring("bf16", [min(n, 128) for n in first], 2, 128)
    packed = linear(name, [max(n - 132, 0) for n in first], 2)
    compare(query(packed, 8), [packed, sinks, recent])


def test_many_more_units_than_the_gpu_has_room_for() -> None:
    lens = [(37 * i) % 500 for i in range(200)]
    lens[150] = 6000
    segment = linear("int4-g4", lens, 8)
    compare(query(segment, 32), [segment])


def test_with_num_splits_other_lengths_do_not_matter() -> None:
    segment = linear("int4-g4", LENS["one far beyond the others"], 2)
    q = query(segment, 8)
    before = compare(q, [segment], num_splits=3)
    segment.seq_lens[0] = 7
    assert torch.equal(compare(q, [segment], num_splits=3)[1:], before[1:])


def test_a_graph_follows_lengths_from_alike_to_ragged_and_back() -> None:
    segment = linear("int4-g4", [4096] * 6, 2)
    q = query(segment, 8)
    graph, (out, lse) = captured(lambda: attend_segments(q, [segment], return_lse=True))
    for lens in ([4096] * 6, [0, 4096, 0, 1, 2, 3], [0] * 6, [100] * 6, [4096, 9, 9, 9, 9, 2000]):
        segment.seq_lens.copy_(torch.tensor(lens))
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        for _ in range(2):
            graph.replay()
            eager, eager_lse = attend_segments(q, [segment], return_lse=True)
            assert torch.equal(out, eager) and torch.equal(lse, eager_lse)
        expected = attend_segments(q.float(), [segment], backend="reference")
        assert relative_l2(out, expected) <= LIMITS[q.dtype] or not any(lens)
