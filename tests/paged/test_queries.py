"""Several queries a sequence: those of a step's new tokens, each like one that came alone."""

from __future__ import annotations

import pytest
import torch
from paged_cases import begin, rows_of, same, values
from paged_plans import PLANS, make_paged
from row_kinds import KINDS

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
                found = one.step(layer, *q, *rows, **of.options, return_lse=True)
                other.append(layer, *rows)
                assert same(found, of.attend(other, layer, q, return_lse=True))
    assert same(values(one.cache, "a"), values(other.cache, "a"))
