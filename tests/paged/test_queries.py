"""Several queries a sequence: those of a step's new tokens, each like one that came alone."""

from __future__ import annotations

import pytest
import torch
from paged_cases import (
    DIM,
    HEADS,
    LAYERS,
    begin,
    extend,
    make,
    new_rows,
    rows_of,
    same,
    values,
)
from paged_plans import PLANS, make_paged
from relative_l2 import relative_l2
from row_kinds import KINDS
from slow_cases import mark_slow

from kvquant.errors import ShapeError
from kvquant.ops.attention import State
from kvquant.paged.batch import PagedBatch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WIDTH = 5  # queries of a sequence that there is room for


def padded(q: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Queries of all new tokens, one after another, as rows of each sequence; NaN elsewhere."""
    rows = q.new_full((len(counts), WIDTH, *q.shape[1:]), torch.nan)
    for row, queries in zip(rows, q.split(counts), strict=True):
        row[: len(queries)] = queries
    return rows


def one_by_one(
    batch: PagedBatch, ids: list[str], counts: list[int], rows: torch.Tensor, q: torch.Tensor
) -> list[State]:
    """The states of each layer, padded, of each query alone: the tokens behind it are cut off."""
    shape = len(ids), WIDTH, q.shape[1]
    found = [
        (q.new_zeros(*shape, DIM), q.new_full(shape, -torch.inf).float())
        for _ in range(batch.cache.num_layers)
    ]
    extend(batch, ids, counts, rows=rows)
    for at, (name, count, queries) in enumerate(zip(ids, counts, q.split(counts), strict=True)):
        length = batch.cache.length(name)
        for i in reversed(range(count)):
            batch.cache.truncate(name, length - count + i + 1)
            with batch.extend([name], 0):
                for layer, (out, lse) in enumerate(found):
                    out[at, i], lse[at, i] = batch.attend(layer, queries[i][None], return_lse=True)
        batch.cache.truncate(name, length - count)
    extend(batch, ids, counts, rows=rows)
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shared", [False, True], ids=["own pages", "shared"])
@pytest.mark.parametrize(
    "kind", mark_slow(["no plan", "matrix clip feedback", "offset"], ["no plan", "offset"])
)
def test_each_query_is_like_one_alone(kind: str, shared: bool, device: str) -> None:
    on_cuda, options = (
        device == "cuda",
        {"sink_len": 3, "recent_len": 0, "num_pages": 40, "max_num_seqs": 5},
    )
    batches = []
    for sharing in (shared, False):
        torch.manual_seed(0)
        cache = (
            make(**options, device=device)
            if kind == "no plan"
            else make_paged(PLANS[kind], **options, device=device)
        )
        batch = PagedBatch(cache, 5, 70, shared_prefix=sharing)
        begin(batch, "a", 40)
        for name in "bc":
            cache.fork("a", name)
        begin(batch, "z", 7)
        cache.allocate("new")
        batches.append(batch)
    steps: list[tuple[list[str], list[int]]] = [
        (["b", "z", "a", "c"], [5, 2, 1, 4]),
        (["new", "a"], [3, 5]),
        (["a", "c", "new", "b"], [5, 0, 5, 2]),
    ]
    dtype = torch.bfloat16 if on_cuda else torch.float32
    for ids, counts in steps:
        rows = new_rows(sum(counts), device)
        q = torch.randn(sum(counts), 2 * HEADS, DIM, device=device, dtype=dtype)
        many, single = batches
        expected = one_by_one(single, ids, counts, rows, q)
        with many.extend(ids, counts):
            for layer, (wanted, wanted_lse) in enumerate(expected):
                many.append(layer, *rows)
                out, lse = many.attend(layer, padded(q, counts), return_lse=True)
                assert torch.equal(lse == -torch.inf, wanted_lse == -torch.inf)
                assert not out[wanted_lse == -torch.inf].any()
                assert relative_l2(out, wanted) < (8e-3 if on_cuda else 1e-5)
                seen = wanted_lse > -torch.inf
                assert relative_l2(lse[seen], wanted_lse[seen]) < (2e-3 if on_cuda else 1e-5)
        assert int(many._num_members > 1) == int(shared and "b" in ids)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_append_and_attend(kind: str, device: str) -> None:
    of = KINDS[kind]
    batches = []
    for _ in range(2):
        torch.manual_seed(0)
        is_planned = kind == "heads" and device == "cpu"
        cache = make_paged(PLANS["matrix"]) if is_planned else of.make(device=device)
        batch = of.batch(cache, 2, 40)
        begin(batch, "a", 30)
        batches.append(batch)
    one, other = batches
    for axes, count in (((1, 6), 1), ((1, 3, 6), 3)):
        q, rows = of.queries(*axes, device=device), rows_of(one.cache, count)
        with one.extend(["a"], count), other.extend(["a"], count):
            for layer in range(one.cache.num_layers):
                found = one.step(layer, *q, *rows, **of.options)
                other.append(layer, *rows)
                assert torch.equal(found, of.attend(other, layer, q))
    assert same(values(one.cache, "a"), values(other.cache, "a"))


def test_queries_that_do_not_fit_are_refused() -> None:
    batch = PagedBatch(make(), 4, 90)
    begin(batch, "a", 20)
    with batch.extend(["a"], 3):
        for layer in range(LAYERS):
            batch.append(layer, *new_rows(3))
        with pytest.raises(ShapeError, match="a sequence of the step has 3 new tokens: give"):
            batch.attend(0, torch.randn(1, 2, 4, DIM))
        with pytest.raises(ShapeError, match=r"give q.transpose\(1, 2\)"):
            batch.attend(0, torch.randn(1, 4, 3, DIM))
        with pytest.raises(ShapeError, match="q has 5 rows"):
            batch.attend(0, torch.randn(5, 3, 4, DIM))
    batch._captured[2] = 2
    with pytest.raises(ShapeError, match=r"3 tokens, 3 of one: .* captured 4 and 90, 2 of one"):
        batch.extend(["a"], 3).__enter__()
