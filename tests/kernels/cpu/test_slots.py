"""Slots found and checked by numba are those of torch; 10 s."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvquant.errors import ShapeError
from kvquant.ops import slots
from kvquant.ops.slots import check_slots, slots_of
from kvquant.rows.slots import Slots, Split


def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "_are_on_cpu", lambda *tensors: False)


def found(call: dict[str, Any]) -> list[list[int] | None] | str:
    """The slots, or the message of the error."""
    try:
        return [None if x is None else x.tolist() for x in slots_of(**call)]
    except ShapeError as error:
        return str(error)


def random_call(draw: np.random.Generator) -> dict[str, Any]:
    """A call of slots_of; in one of four something is, or may be, not possible."""
    batch, new_tokens = int(draw.integers(0, 5)), int(draw.integers(0, 20))
    sink_len, recent_len = (int(draw.choice([0, 0, 1, 4, 9])) for _ in "ab")
    page_size, has_pages = int(draw.choice([1, 4, 16, 64])), draw.random() < 0.4
    dtype = (torch.int32, torch.int64)[draw.integers(2)]
    lens = torch.tensor(draw.integers(0, 40, batch), dtype=dtype)
    packed_lens = Split(sink_len, recent_len, 1).packed_lens(lens, torch.zeros_like(lens))
    most = (lens - sink_len).clamp(min=0)
    packed_lens += torch.tensor(draw.random(batch) * (most - packed_lens + 1).numpy()).to(dtype)
    new_lens = torch.tensor(draw.integers(0, new_tokens + 1, batch), dtype=dtype)
    pages = -(-60 // page_size)
    table = torch.tensor(draw.permutation(batch * pages).reshape(batch, pages), dtype=torch.int32)
    seq_slots = torch.tensor(draw.permutation(batch + 3)[:batch])
    if batch and draw.random() < 0.25:
        broken = (lens, packed_lens, new_lens, seq_slots, table)[draw.integers(5)]
        broken.view(-1)[draw.integers(broken.numel())] += int(draw.choice([-60, -1, 1, 60]))
    return {
        "seq_lens": lens,
        "packed_lens": packed_lens,
        "new_lens": new_lens if draw.random() < 0.7 else None,
        "new_tokens": new_tokens,
        "page_size": page_size if has_pages else int(draw.integers(1, 70)),
        "sink_len": sink_len,
        "recent_len": recent_len,
        "block_table": table if has_pages else None,
        "seq_slots": seq_slots if draw.random() < 0.5 else None,
    }


def test_slots_and_errors_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(1)
    calls = [random_call(draw) for _ in range(1500)]
    ours = [found(call) for call in calls]
    refused = sum(isinstance(result, str) for result in ours)
    assert 100 < refused < 900
    in_torch(monkeypatch)
    for call, result in zip(calls, ours, strict=True):
        assert result == found(call), call


def outcome(given: Slots, num_packed: int, num_exact: int) -> str:
    try:
        check_slots(given, num_packed, num_exact)
    except ShapeError as error:
        return str(error)
    return "possible"


def test_what_is_refused_is_what_torch_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(2)
    given = []
    for _ in range(600):
        count = int(draw.integers(0, 40))
        packed = torch.tensor(draw.permutation(130)[:count])
        exact = torch.tensor(draw.permutation(70)[:count])
        evicted = torch.tensor(128 + draw.permutation(130)[:count])
        exact[draw.random(count) < 0.5] = -1
        evicted[(exact < 0).numpy() | (draw.random(count) < 0.5)] = -2
        packed[draw.random(count) < 0.2] = -1
        for tensor in (packed, exact, evicted):
            if count and draw.random() < 0.15:
                tensor[draw.integers(count)] = int(draw.choice([-1, 5, 130, 300]))
        given.append((Slots(packed, exact, evicted), 256, int(draw.choice([69, 70, 70, 70]))))
        given.append((Slots(packed), int(draw.choice([129, 130, 130])), 0))
    ours = [outcome(*call) for call in given]
    assert 300 < ours.count("possible") < 1000
    in_torch(monkeypatch)
    for call, result in zip(given, ours, strict=True):
        assert result == outcome(*call), call


@pytest.mark.parametrize("stride", [1, 64, 4096, 2**20, 2**32], ids=lambda n: f"every {n}")
def test_slots_at_any_stride_are_checked(stride: int) -> None:
    regular = torch.arange(20_000) * stride
    check_slots(Slots(regular), 20_000 * stride, 0)
    regular[-1] = regular[7]
    with pytest.raises(ShapeError, match=r"given twice in slots.packed \(places 7 and 19999\)"):
        check_slots(Slots(regular), 20_000 * stride, 0)
