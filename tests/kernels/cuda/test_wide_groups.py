"""The kernel for wide groups against the reference on the dequantized rows. Needs a Hopper GPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from attend import launch_attention
from cuda_cases import LIMITS, int32, linear, paged, queries, query, ring, seated
from query_cases import reference_of_queries
from ragged_cases import each_alone, indptr
from relative_l2 import relative_l2

from kvquant.kernels.cuda.decode import launch
from kvquant.rows.segment import Segment

pytestmark = pytest.mark.gpu
LENS = (1000, 37, 1, 0)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """For short contexts of few sequences, too."""
    if torch.cuda.get_device_capability() != launch.WARPGROUPS:
        pytest.skip("no wgmma")
    monkeypatch.setattr(launch, "pays", lambda *_: True)
    monkeypatch.setattr(launch, "_launches", {})


def compare(
    q: torch.Tensor,
    segment: Segment,
    q_lens: Sequence[int] | None = None,
    num_splits: int | None = None,
) -> None:
    """Assert that out is that of the reference, 0 where a query sees nothing; the same again."""
    four = q if q.ndim == 4 else q[:, None]
    numbers = int32(q_lens or [four.shape[1]] * len(q))
    given = None if q_lens is None else numbers
    expected, expected_lse = reference_of_queries(four.double().float(), [segment], numbers)
    expected, expected_lse = expected.view(q.shape), expected_lse.view(q.shape[:-1])
    out, _ = launch_attention(q, [segment], None, num_splits, False, given)
    used = expected_lse > -torch.inf
    assert not out[~used].any()
    assert relative_l2(out, expected) <= LIMITS[q.dtype]
    again, _ = launch_attention(q, [segment], None, num_splits, False, given)
    assert torch.equal(again, out), "two calls differ"


@pytest.mark.parametrize("ratio", [17, 64, 71, 130])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("names", ["int4-g4", "int4", "int2 int8-g4", "int8 int4-g8", "fp8-g4 fp8"])
def test_formats(names: str, dtype: str, ratio: int) -> None:
    segment = linear(names, LENS, 2)
    q = query(segment, 2 * ratio, DTYPES[dtype])
    for num_splits in (None, 1, 3):
        compare(q, segment, num_splits=num_splits)


@pytest.mark.parametrize("ratio", [32, 100])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_places(page_size: int, ratio: int) -> None:
    for segment in (
        paged("int4-g4", LENS, 2, page_size),
        ring("int4-g4", (500, 37, 500, 0), 2, 500, sinks=4),
        seated(ring("int4-g4", (500, 37, 500, 0), 2, 500, sinks=4)),
        linear("int4", LENS, 2, order="tokens"),
        linear("int4-g4", LENS, 2, head_dim=64),
    ):
        compare(query(segment, 2 * ratio), segment)


@pytest.mark.parametrize("num_splits", [None, 3])
def test_lengths_that_differ_and_queries(num_splits: int | None) -> None:
    segment = linear("int4-g4", [3000, *range(0, 320, 10)], 2)
    compare(query(segment, 64), segment, num_splits=num_splits)
    segment = linear("int4-g4", LENS, 2)
    compare(queries(segment, 4, 32), segment, (4, 3, 1, 0), num_splits)
    compare(queries(segment, 8, 32), segment, (8, 3, 2, 1), num_splits)


@pytest.mark.parametrize("ratio", [8, 16, 71])
def test_ragged_queries(ratio: int) -> None:
    """Where one query has few columns it takes the kernel for long chunks only."""
    segment, counts = linear("int4-g4", LENS, 2), (40, 1, 0, 3)
    q = torch.randn(sum(counts), 2 * ratio, 128, device="cuda").bfloat16()
    expected, _ = each_alone(q.double().float(), [segment], counts)
    at = indptr(counts, "cuda")
    for num_splits in (None, 3):
        out, _ = launch_attention(q, [segment], None, num_splits, False, q_indptr=at)
        assert relative_l2(out, expected) <= LIMITS[q.dtype]
        assert not out[-3:].any()
