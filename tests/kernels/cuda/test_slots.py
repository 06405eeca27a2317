"""The kernel that places new tokens: in numba's simulator, as machine code, its launch. No GPU."""

from __future__ import annotations

import random
from unittest import mock

import pytest
import torch
from in_simulator import SIMULATED, in_simulator
from layer_states import SPLITS, Split, make_layer, place, random_crop, random_lens

from kvquant.cache.layer import LayerCache
from kvquant.kernels.cuda.slots import launch as launcher
from kvquant.kernels.cuda.slots.launch import SlotSpec

if SIMULATED:
    from simulated_launches import simulated

pytestmark = pytest.mark.extra("cuda")
SPEC = SlotSpec(1)


def run(
    at: LayerCache,
    new_lens: torch.Tensor | None,
    new_tokens: int,
    overflow: torch.Tensor,
    backwards: bool,
) -> torch.Tensor:
    """Run the kernel on a layer; the room that it has filled."""
    batch = len(at.seq_lens)
    room = torch.full((3, batch * new_tokens + batch), -7)
    given = at.lens, at.sizes, new_lens, new_tokens, overflow, room
    one_warp = mock.patch.object(launcher, "SlotSpec", lambda **_: SPEC)
    with simulated(*given, backwards=backwards), one_warp:
        launcher.place_tokens(*given)
    return room


def compare(split: Split, seed: int) -> None:
    """Steps and crops of two layers, one by the kernel and one by the meaning."""
    draw, batch = random.Random(seed), 3
    at, other = make_layer(split, batch), make_layer(split, batch)
    overflow, other_overflow = torch.zeros(2, 1, dtype=torch.int32)
    for step in range(7):
        new_tokens = draw.choice([1, 1, 2, 7, 40])
        lens = random_lens(draw, batch, new_tokens)
        given = None
        if lens is not None:
            dtype, every = draw.choice([torch.int32, torch.int64]), draw.choice([1, 2])
            given = torch.zeros(every * batch, dtype=dtype)[::every].copy_(torch.tensor(lens))
        before = [at.seq_lens.tolist(), at.packed_lens.tolist()]
        before += [at.firsts.tolist()] if at.window is not None else [[-7] * batch]
        room = run(at, given, new_tokens, overflow, backwards=bool(step % 2))
        slots = place(other, lens, new_tokens, other_overflow)
        for found, expected in zip(room[:, :-batch], slots, strict=True):
            assert expected is None or torch.equal(found, expected), (split, seed, step)
        assert room[:, -batch:].tolist() == before
        for name, tensor in at.tensors().items():
            assert torch.equal(tensor, other.tensors()[name]), (name, split, seed, step)
        assert torch.equal(overflow, other_overflow)
        for one in (at, other):
            random_crop(random.Random(seed + step), one)


@in_simulator
def test_slots_and_lengths_are_those_of_torch() -> None:
    for seed, split in [*enumerate(SPLITS.values())][::4]:
        compare(split, seed)


@pytest.mark.slow
@in_simulator
def test_those_of_all_splits_are_too() -> None:
    for seed, split in enumerate(SPLITS.values()):
        compare(split, seed)


@in_simulator
def test_slots_may_be_larger_than_32_bits() -> None:
    batch = 3
    at = make_layer(SPLITS["no 16-bit rows"], batch)
    at.sizes = at.sizes._replace(packed_len=2**31 - 1, max_seq_len=2**31 - 1)
    overflow = torch.zeros(1, dtype=torch.int32)
    at.seq_lens.fill_(2**31 - 3)
    at.packed_lens.fill_(2**31 - 3)
    room = run(at, torch.tensor([2**32 + 1, -(2**33), 1]), 2, overflow, False)
    first = 2**31 - 3
    expected = [first, first + 1, -1, -1, 2 * (2**31 - 1) + first, -1]
    assert room[0, : 2 * batch].tolist() == expected
    assert at.seq_lens.tolist() == [2**31 - 1, 2**31 - 3, 2**31 - 2]
