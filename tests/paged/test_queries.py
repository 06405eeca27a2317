"""Several queries a sequence: those of a step's new tokens, each like one that came alone."""

from __future__ import annotations

import pytest
import torch
from paged_cases import (
    DIM,
    LAYERS,
    begin,
    make,
    new_rows,
    rows_of,
    same,
    values,
)
from paged_plans import PLANS, make_paged
from row_kinds import KINDS

from kvquant.errors import ShapeError
from kvquant.paged.batch import PagedBatch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


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
